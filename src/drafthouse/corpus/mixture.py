"""From settings to samples: every source fills its quota, duplicates and unusable records are counted."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerFast

from drafthouse.corpus import grammar, jsonl, sources
from drafthouse.corpus.draw import Draw
from drafthouse.corpus.records import Conversation, Prompt, Split, TokenSample
from drafthouse.corpus.settings import CorpusSettings, GrammarSource, Source, StdlibSource
from drafthouse.corpus.template import ChatTemplate, Dropped, TemplateRefusedError, render_text
from drafthouse.corpus.tokenizer import default_chat_template
from drafthouse.progress import Progress, Silent

_BATCH = 32
# A source that gives nothing new for so long is taken to be exhausted (the standard library is finite).
_PATIENCE = 2_000


@dataclass
class Report:
    """What did not become a sample, and why."""

    drops: Counter[str] = field(default_factory=Counter)
    malformed: dict[str, jsonl.Malformed] = field(default_factory=dict)
    short: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "malformed": {
                path: {"counts": dict(sorted(found.counts.items())), "examples": found.examples}
                for path, found in sorted(self.malformed.items())
            },
            "short": dict(sorted(self.short.items())),
        }

    def all_drops(self) -> dict[str, int]:
        """Drops by reason; malformed records are counted as `malformed_<reason>`."""
        counts = Counter(self.drops)
        for found in self.malformed.values():
            counts.update({f"malformed_{reason}": number for reason, number in found.counts.items()})
        return dict(sorted(counts.items()))


def source_name(source: Source) -> str:
    """How a source is named in reports."""
    return f"{source.type}:{source.path if source.type == 'jsonl' else source.kind}"


def training_texts(settings: CorpusSettings, samples: int, chat_template: str | None = None) -> Iterator[str]:
    """Rendered conversations of the training split, to train a tokenizer on: `samples` over all sources."""
    template = default_chat_template() if chat_template is None else chat_template
    fitted = settings.model_copy(update={"samples": samples, "sources": tuple(map(_by_weight, settings.sources))})
    report = Report()
    for source, quota in zip(fitted.sources, fitted.quotas(), strict=True):
        for conversation in islice(_conversations(source, fitted.seed, "train", report), quota):
            try:
                yield render_text(conversation, template)
            except TemplateRefusedError:
                continue


def token_samples(
    settings: CorpusSettings,
    tokenizer: PreTrainedTokenizerFast,
    split: Split = "train",
    report: Report | None = None,
    progress: Progress | None = None,
) -> Iterator[TokenSample]:
    """The samples of one split in their final order; masks proven, duplicates dropped.

    Of the held-out split every source gives `settings.heldout` samples.

    Raises:
        CorpusError: a source cannot be read, or a chat template cannot be masked.
    """
    report = Report() if report is None else report
    quotas = settings.quotas() if split == "train" else [settings.heldout] * len(settings.sources)
    template = ChatTemplate(tokenizer)
    seen: set[bytes] = set()
    supplies = [_Supply(source, settings, split, template, seen, report) for source in settings.sources]
    order = [place for place, quota in enumerate(quotas) for _ in range(quota)]
    with (progress or Silent()).task(f"corpus ({split})", len(order)) as task:
        for place in Draw(settings.seed, "order", split).shuffled(order):
            taken = supplies[place].take()
            if taken is None:
                name = source_name(settings.sources[place])
                report.short[name] = report.short.get(name, 0) + 1
            else:
                yield taken[1]
            task.advance()


def prompts(settings: CorpusSettings, tokenizer: PreTrainedTokenizerFast, split: Split = "heldout") -> list[Prompt]:
    """`settings.heldout` prompts of every source, source by source; no question occurs twice.

    Raises:
        CorpusError: a source cannot be read, or the template's generation prompt does not fit its rendering.
    """
    template = ChatTemplate(tokenizer)
    report = Report()
    seen: set[bytes] = set()
    asked: set[bytes] = set()
    out: list[Prompt] = []
    for source in settings.sources:
        supply = _Supply(source, settings, split, template, seen, report)
        count = 0
        while count < settings.heldout and (taken := supply.take()) is not None:
            prompt = template.prompt(*taken)
            if isinstance(prompt, Dropped) or (key := prompt.input_ids.tobytes()) in asked:
                continue
            asked.add(key)
            out.append(prompt)
            count += 1
    return out


class _Supply:
    """Accepted samples of one source, made a batch at a time."""

    def __init__(
        self,
        source: Source,
        settings: CorpusSettings,
        split: Split,
        template: ChatTemplate,
        seen: set[bytes],
        report: Report,
    ) -> None:
        self._records = _conversations(source, settings.seed, split, report)
        self._max_tokens, self._template = settings.max_tokens, template
        self._seen, self._report = seen, report
        self._ready: deque[tuple[Conversation, TokenSample]] = deque()

    def take(self) -> tuple[Conversation, TokenSample] | None:
        """The next accepted sample, or None when the source has no more."""
        tried = 0
        while not self._ready:
            if tried >= _PATIENCE:
                return None
            batch = list(islice(self._records, _BATCH))
            if not batch:
                return None
            tried += len(batch)
            fresh = [record for record in batch if self._is_new(record)]
            for record, made in zip(fresh, self._template.samples(fresh, self._max_tokens), strict=True):
                if isinstance(made, Dropped):
                    self._report.drops[made.reason] += 1
                else:
                    self._ready.append((record, made))
        return self._ready.popleft()

    def _is_new(self, record: Conversation) -> bool:
        key = bytes.fromhex(record.content_hash())[:16]
        if key in self._seen:
            self._report.drops["duplicate"] += 1
            return False
        self._seen.add(key)
        return True


def _conversations(source: Source, seed: int, split: Split, report: Report) -> Iterator[Conversation]:
    if isinstance(source, GrammarSource):
        return grammar.conversations(source.kind, seed, split)
    if isinstance(source, StdlibSource):
        return sources.conversations(source.kind, seed, split)
    found = report.malformed.setdefault(str(source.path), jsonl.Malformed())
    return jsonl.conversations(source.path, source.kind, split, found)


def _by_weight(source: Source) -> Source:
    return source.model_copy(update={"count": None, "weight": float(source.count or source.weight)})
