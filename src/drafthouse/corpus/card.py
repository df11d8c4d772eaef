"""The corpus card: what a corpus holds, where it comes from, what was left out, as JSON and as one HTML file.

In the spirit of "Datasheets for Datasets" (Gebru et al. 2021): the figures are counted from the shards themselves,
not copied from what their maker claimed.
"""

from __future__ import annotations

import itertools
import json
from importlib.resources import files
from typing import Any

import jinja2
import numpy as np

from drafthouse.corpus.conversations import REGENERATION
from drafthouse.corpus.shards import CorpusReader, Lengths, Manifest
from drafthouse.errors import CorpusError
from drafthouse.progress import Progress, Silent
from drafthouse.store import Store

SCHEMA = 1
_QUANTILES = (50, 90, 99)
_COLOURS = 6


class _Histogram:
    """Exact counts of every length; quantiles and powers-of-two bins are read off it."""

    def __init__(self) -> None:
        self._counts: Lengths = np.zeros(1, dtype=np.int64)

    def add(self, lengths: Lengths) -> None:
        if len(lengths):
            more = np.bincount(lengths)
            if len(more) > len(self._counts):
                self._counts = np.concatenate([self._counts, np.zeros(len(more) - len(self._counts), dtype=np.int64)])
            self._counts[: len(more)] += more

    def summary(self) -> dict[str, Any]:
        """Tokens: mean, quantiles (nearest rank), longest; `bins` are [low, high, samples], two an octave."""
        total = int(self._counts.sum())
        places = np.arange(len(self._counts))
        ranks = np.cumsum(self._counts)
        powers = [1 << step for step in range(len(self._counts).bit_length() + 1)]
        edges = sorted({edge for power in powers for edge in (power, power * 3 // 2)})
        bins = [[low, high - 1, int(self._counts[low:high].sum())] for low, high in itertools.pairwise(edges)]
        filled = [place for place, (_, _, count) in enumerate(bins) if count]
        bins = bins[filled[0] : filled[-1] + 1] if filled else []
        return {
            "mean": round(float((places * self._counts).sum() / total), 1) if total else 0.0,
            **{f"p{q}": int(np.searchsorted(ranks, -(-total * q // 100))) for q in _QUANTILES},
            "max": len(self._counts) - 1,
            "bins": bins,
        }


def corpus_card(store: Store, name: str, progress: Progress | None = None) -> dict[str, Any]:
    """The card of a sealed token corpus; every shard is read and its hash checked, one at a time.

    Raises:
        CorpusError: there is no such corpus, a shard is damaged, or the numbers do not add up.
    """
    reader = CorpusReader(store, name)
    manifest = reader.manifest
    lengths: dict[str, _Histogram] = {}
    answers = _Histogram()
    everything = _Histogram()
    counted: dict[str, list[int]] = {}
    with (progress or Silent()).task("reading shards", len(reader.shard_names)) as task:
        for shard in reader.shard_names:
            kinds, which, tokens, masked = reader.lengths(shard)
            everything.add(tokens)
            answers.add(masked)
            for place, kind in enumerate(kinds):
                mine = which == place
                lengths.setdefault(kind, _Histogram()).add(tokens[mine])
                totals = counted.setdefault(kind, [0, 0, 0])
                for at, count in enumerate((mine.sum(), tokens[mine].sum(), masked[mine].sum())):
                    totals[at] += int(count)
            task.advance()
    for kind, claimed in manifest.kinds.items():
        if counted.get(kind) != [claimed.samples, claimed.tokens, claimed.masked]:
            raise CorpusError(
                f"the shards hold {counted.get(kind)} samples, tokens and masked tokens of kind '{kind}', the manifest"
                f" says {[claimed.samples, claimed.tokens, claimed.masked]}",
                where=name,
                fix="build the corpus again",
            )
    origin = manifest.report.get("conversations", {})
    sources, total = _accounts(name, origin.get("sources", {}), origin.get("drops", {}))
    return {
        "schema": SCHEMA,
        "name": name,
        "conversations": origin.get("name"),
        "split": manifest.split,
        "digest": manifest.digest,
        "tokenizer_sha256": manifest.tokenizer_sha256,
        "samples": manifest.samples,
        "tokens": manifest.tokens,
        "masked": sum(kind.masked for kind in manifest.kinds.values()),
        "shards": len(manifest.shards),
        "bytes": sum(shard.size for shard in manifest.shards),
        "kinds": [
            {
                "kind": kind,
                "samples": count.samples,
                "tokens": count.tokens,
                "masked": count.masked,
                "share": round(count.samples / manifest.samples, 6),
                "lengths": lengths[kind].summary(),
            }
            for kind, count in sorted(manifest.kinds.items(), key=lambda item: (-item[1].samples, item[0]))
        ],
        "lengths": everything.summary(),
        "answers": answers.summary(),
        "sources": sources,
        "total": total,
        "way": _way(name, manifest, total, origin.get("drops", {}).get(REGENERATION, {})),
        "drops": _drops(manifest.drops, origin.get("drops", {})),
        "short": origin.get("short") or manifest.report.get("short", {}),
        "examples": origin.get("examples") or _examples(manifest.report.get("malformed", {})),
        "settings": manifest.settings,
        "fingerprints": manifest.sources,
    }


def _accounts(
    name: str, sources: dict[str, dict[str, Any]], drops: dict[str, dict[str, int]]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """What became of the records of every source and of all: read = taken + heldout + left_out.

    Raises:
        CorpusError: of some source it is not so.
    """
    rows = []
    for source, facts in sources.items():
        left_out = sum(drops.get(source, {}).values())
        # Sets that were sealed without it: what was held out is what is missing.
        heldout = facts.get("heldout", facts["read"] - facts["taken"] - left_out)
        if heldout < 0 or facts["read"] != facts["taken"] + heldout + left_out:
            raise CorpusError(
                f"of the source '{source}' {facts['read']} records were read; {facts['taken']} taken, {heldout} held"
                f" out and {left_out} left out do not add up to that",
                where=name,
                fix="curate its sources again",
            )
        rows.append({"name": source, **facts, "heldout": heldout, "left_out": left_out})
    return rows, {key: sum(row[key] for row in rows) for key in ("read", "taken", "heldout", "left_out")}


def _way(name: str, manifest: Manifest, total: dict[str, int], answering: dict[str, int]) -> dict[str, int] | None:
    """How many conversations of the split were left out behind the curation; None where there was none.

    Raises:
        CorpusError: with them the samples are not as many as the conversations.
    """
    if not total["read"]:
        return None
    given = total["taken" if manifest.split == "train" else "heldout"]
    lost = {"regeneration": sum(answering.values()), "tokens": sum(manifest.drops.values())}
    if given != manifest.samples + sum(lost.values()):
        raise CorpusError(
            f"{given} conversations were curated, and {manifest.samples} samples, {lost['regeneration']} that were left"
            f" out by regeneration and {lost['tokens']} by template and tokens do not add up to that",
            where=name,
            fix="tokenise it again under another name",
        )
    return {"conversations": given, **lost, "samples": manifest.samples}


def _drops(tokenising: dict[str, int], by_source: dict[str, dict[str, int]]) -> list[dict[str, Any]]:
    """Reasons with their count and sources, the most frequent first."""
    reasons: dict[str, dict[str, int]] = {}
    for source, counts in by_source.items():
        for reason, count in counts.items():
            reasons.setdefault(reason, {})[source] = count
    for reason, count in tokenising.items():
        reasons.setdefault(reason, {})["(template and tokens)"] = count
    found = [
        {"reason": reason, "count": sum(where.values()), "sources": where, "meaning": MEANINGS.get(_plain(reason), "")}
        for reason, where in reasons.items()
    ]
    return sorted(found, key=lambda one: (-int(str(one["count"])), str(one["reason"])))


def _plain(reason: str) -> str:
    return reason.removeprefix("malformed_")


def _examples(malformed: dict[str, Any]) -> dict[str, Any]:
    return {path: found["examples"] for path, found in malformed.items()}


# What a reason means, in words for somebody who has not read the code.
MEANINGS = {
    "duplicate": "said word for word by an earlier record",
    "near_duplicate": "nearly the same as an earlier record (MinHash)",
    "contaminated": "shares words in a row with an evaluation prompt",
    "over_quota_train": "not needed: the kind's quota or the source's cap is full",
    "over_quota_heldout": "held out, beyond the number that is wanted",
    "too_short": "fewer characters than min_chars",
    "too_many_chars": "more characters than max_chars",
    "too_many_turns": "more messages than max_turns",
    "cut_to_nothing": "not one answer fits cut_to_chars",
    "not_json": "the line is not JSON",
    "not_utf8": "bytes that are not UTF-8",
    "too_deep": "nested in more levels than can be read back",
    "not_object": "the record is not an object",
    "not_unicode": "half of a surrogate pair",
    "not_text": "content that is not text",
    "no_messages": "no list of messages",
    "no_question": "nobody asks",
    "no_answer": "the last turn is not the assistant's",
    "empty_answer": "the last turn says and calls nothing",
    "bad_message": "a turn without a known role or form",
    "bad_tools": "tool schemas that cannot be read",
    "bad_tool_call": "a call without a name or with arguments that are not JSON",
    "template_refused": "the chat template refuses the conversation",
    "control_tokens": "a turn's text holds a control token",
    "straddles": "a token crosses the border of an answer",
    "not_proven": "no mask can be derived and proven",
    "too_long": "more tokens than max_tokens",
    "cut": "the target was stopped by max_tokens",
    "refused": "the endpoint refuses the question",
    "given_up": "not answered after all tries",
    "empty": "the target said and called nothing",
}


def card_json(card: dict[str, Any]) -> str:
    return json.dumps(card, indent=1, ensure_ascii=False) + "\n"


def card_html(card: dict[str, Any]) -> str:
    """One HTML file that needs nothing else: no script, no font, no request."""
    folder = files(__package__)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"count": _count, "short": _short, "size": _size, "percent": _percent}
    template = environment.from_string(folder.joinpath("card.html.j2").read_text(encoding="utf-8"))
    kinds = card["kinds"]
    # Beyond the colours that can be told apart, the rest is one.
    shown = kinds if len(kinds) <= _COLOURS else kinds[: _COLOURS - 1]
    return template.render(
        card=card,
        css=folder.joinpath("card.css").read_text(encoding="utf-8"),
        bars=_stacked(card, shown),
        shown=shown,
        others=len(kinds) - len(shown),
    )


def _stacked(card: dict[str, Any], shown: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bars of the length histogram, with the parts of the kinds (the rest last) as shares of the tallest bar."""
    tallest = max((count for _, _, count in card["lengths"]["bins"]), default=1) or 1
    bars = []
    for low, high, count in card["lengths"]["bins"]:
        parts = [next((number for start, _, number in kind["lengths"]["bins"] if start == low), 0) for kind in shown]
        parts.append(count - sum(parts))
        bars.append({"low": low, "high": high, "count": count, "parts": [100 * part / tallest for part in parts]})
    return bars


def _count(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\u202f")


def _short(value: float) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}\u00a0{unit}"
    return f"{value:.0f}"


def _size(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g}\u00a0{unit}"
        value /= 1024
    return f"{value:.3g}\u00a0TiB"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}\u00a0%" if value >= 0.0005 or not value else "<\u00a00.1\u00a0%"
