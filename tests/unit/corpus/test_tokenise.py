"""Sealed conversations to a token corpus and its card: resumable, damaged shards replaced, figures counted."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from drafthouse.corpus import CorpusReader, CorpusSettings, GrammarSource, build, save_tokenizer
from drafthouse.corpus import tokenise as tokenising
from drafthouse.corpus.card import card_html, card_json, corpus_card
from drafthouse.corpus.curate import curate
from drafthouse.corpus.curation import CurationSettings
from drafthouse.corpus.tokenise import tokenise
from drafthouse.errors import CorpusError
from drafthouse.store import Store

CURATION = CurationSettings.model_validate(
    {
        "name": "mix",
        "kinds": {"calls": {"quota": 60}, "lookups": {"quota": 500}},
        "sources": [
            {"type": "grammar", "name": "tools", "kind": "calls", "licence": "MIT", "about": "tool_call", "count": 100},
            {"type": "grammar", "name": "look", "kind": "lookups", "licence": "<b>", "about": "lookup", "count": 90},
        ],
        "heldout_one_in": 10,
        "samples_per_shard": 16,
    }
)


@pytest.fixture(scope="module")
def folder(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(tokenizer, path)
    return path


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    url = str(tmp_path / "store")
    curate(CURATION, url, tmp_path / "work", processes=1)
    yield url
    tokenising._here.clear()


def test_a_corpus_of_the_conversations_in_their_order(url: str, folder: Path) -> None:
    manifest = tokenise(url, "mix", "corpus", folder, max_tokens=512, processes=1)
    reader = CorpusReader(Store.open(url), "corpus")
    samples = list(reader)
    assert len(samples) == manifest.samples == 60 + manifest.kinds["lookups"].samples
    assert manifest.tokens == sum(len(sample.input_ids) for sample in samples)
    assert all(sample.loss_mask.any() for sample in samples)
    assert manifest.report["conversations"]["sources"]["tools"]["licence"] == "MIT"
    assert not Store.open(url).child("corpus").list("parts")


def test_processes_do_not_show(url: str, folder: Path, tmp_path: Path) -> None:
    one = tokenise(url, "mix", "one", folder, max_tokens=512, processes=1)
    elsewhere = str(tmp_path / "elsewhere")
    curate(CURATION, elsewhere, tmp_path / "work-elsewhere", processes=2)
    two = tokenise(elsewhere, "mix", "two", folder, max_tokens=512, processes=2)
    assert one.digest == two.digest
    assert one.kinds == two.kinds


def test_a_run_that_broke_off_goes_on(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = tokenising._tokenise, []

    def broken(job: tokenising._Job) -> object:
        calls.append(job.key)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(job)

    monkeypatch.setattr(tokenising, "_tokenise", broken)
    with pytest.raises(KeyboardInterrupt):
        tokenise(url, "mix", "corpus", folder, max_tokens=512, processes=1)
    store = Store.open(url).child("corpus")
    first, second, third = (json.loads(store.get(info.key)) for info in store.list("parts"))
    store.put(second["shard"]["key"], b"damaged")
    made: list[str] = []
    put = tokenising.put_shard
    monkeypatch.setattr(tokenising, "_tokenise", real)
    monkeypatch.setattr(tokenising, "put_shard", lambda *given: made.append(str(len(given[1]))) or put(*given))
    again = tokenise(url, "mix", "corpus", folder, max_tokens=512, processes=1)
    assert len(made) == len(again.shards) - 2  # the damaged one is written anew
    assert {first["shard"]["key"], third["shard"]["key"]} <= {shard.key for shard in again.shards}
    assert again.digest == tokenise(url, "mix", "other", folder, max_tokens=512, processes=1).digest


def test_too_long_samples_are_counted(url: str, folder: Path) -> None:
    manifest = tokenise(url, "mix", "corpus", folder, max_tokens=110, processes=1)
    assert manifest.drops["too_long"] > 0
    with pytest.raises(CorpusError, match=r"no sample at all \(dropped: \d+ too_long\)"):
        tokenise(url, "mix", "short", folder, max_tokens=16, processes=1)


# Nothing is left of an answer that holds "hush", not even an end of turn that the model would have to say.
HUSHED = r"""{%- for m in messages -%}{{- "<|im_start|>" ~ m.role ~ "</think>" -}}
{%- if "hush" not in m.content -%}{{- m.content -}}{%- endif -%}{{- "<|mask|>" -}}{%- endfor -%}"""


@pytest.mark.parametrize(("hushed", "total"), [(1, 40), (3, 40)])
def test_a_record_beyond_the_template_is_dropped_and_a_template_beyond_the_records_is_not(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, hushed: int, total: int
) -> None:
    other = copy.deepcopy(tokenizer)
    other.chat_template = HUSHED
    save_tokenizer(other, tmp_path / "tokenizer")
    records = [{"instruction": f"q{n}", "output": f"{'hush' if n < hushed else 'a'} {n}"} for n in range(total)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    source = {"type": "files", "name": "a", "kind": "k", "licence": "MIT", "format": "alpaca", "paths": ["a.jsonl"]}
    wanted = {"name": "x", "kinds": {"k": {}}, "sources": [source], "heldout_one_in": 10**9}
    wanted["filters"] = {"near_duplicates": None, "min_chars": 0}
    url = str(tmp_path / "store")
    curate(CurationSettings.model_validate(wanted), url, tmp_path / "work", base=tmp_path, processes=1)
    if hushed == 1:
        manifest = tokenise(url, "x", "corpus", tmp_path / "tokenizer", max_tokens=512, processes=1)
        assert (manifest.samples, manifest.drops) == (39, {"not_proven": 1})
    else:
        with pytest.raises(CorpusError, match="the mask of this conversation is empty"):
            tokenise(url, "x", "corpus", tmp_path / "tokenizer", max_tokens=512, processes=1)


def test_a_name_is_bound_to_its_settings(url: str, folder: Path) -> None:
    first = tokenise(url, "mix", "corpus", folder, max_tokens=512, processes=1)
    assert tokenise(url, "mix", "corpus", folder, max_tokens=512, processes=1) == first
    with pytest.raises(CorpusError, match="another corpus has this name already"):
        tokenise(url, "mix", "corpus", folder, max_tokens=300, processes=1)


def test_what_is_not_there(url: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="there are no conversations of this name"):
        tokenise(url, "none", "corpus", folder, max_tokens=512, processes=1)
    with pytest.raises(CorpusError, match=r"there is no tokenizer\.json"):
        tokenise(url, "mix", "corpus", tmp_path, max_tokens=512, processes=1)


def test_a_card_counts_what_is_there(url: str, folder: Path) -> None:
    manifest = tokenise(url, "mix", "corpus", folder, max_tokens=512, processes=1)
    card = corpus_card(Store.open(url), "corpus")
    lengths = sorted(len(sample.input_ids) for sample in CorpusReader(Store.open(url), "corpus"))
    assert card["samples"] == len(lengths)
    assert card["lengths"]["max"] == lengths[-1]
    assert card["lengths"]["p50"] == lengths[-(-len(lengths) // 2) - 1]
    assert sum(count for _, _, count in card["lengths"]["bins"]) == len(lengths)
    assert card["lengths"]["bins"][0][0] <= lengths[0]
    assert [kind["kind"] for kind in card["kinds"]] == ["lookups", "calls"]
    assert card["short"] == {"lookups": 500 - manifest.kinds["lookups"].samples}
    assert {drop["reason"] for drop in card["drops"]} >= {"over_quota_train"}
    assert json.loads(card_json(card)) == card


def test_the_numbers_of_a_card_add_up(url: str, folder: Path) -> None:
    store = Store.open(url)
    for name, split in (("mix", "taken"), ("mix-heldout", "heldout")):
        tokenise(url, name, f"corpus-{name}", folder, max_tokens=130, processes=1)
        card = corpus_card(store, f"corpus-{name}")
        for source in card["sources"]:
            assert source["read"] == source["taken"] + source["heldout"] + source["left_out"]
            reasons = [drop["sources"].get(source["name"], 0) for drop in card["drops"]]
            assert source["left_out"] == sum(reasons)
        total = card["total"]
        assert total["read"] == 190 == total["taken"] + total["heldout"] + total["left_out"]
        assert total["heldout"] > 0
        assert card["way"]["conversations"] == total[split]
        assert card["way"]["conversations"] == card["samples"] + card["way"]["tokens"]
        page = card_html(card)
        for heading in ("Read", "Taken", "Held out", "Left out"):
            assert f'<th scope="col" class="n">{heading}</th>' in page
        (all_,) = re.findall(r"<tfoot>.*</tfoot>", page)
        numbers = [int(number) for number in re.findall(r'<td class="n">(\d+)</td>', all_)]
        assert numbers == [total[key] for key in ("read", "taken", "heldout", "left_out")]
        assert ("by template and tokens.</p>" in page) == (card["way"]["tokens"] > 0)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            "taken",
            r"of the source 'tools' 100 records were read; \d+ taken, \d+ held out and \d+ left out do not add up",
        ),
        ("all", r"\d+ conversations were curated, and \d+ samples, 0 that were left out by regeneration and 0 by"),
    ],
)
def test_a_card_whose_numbers_do_not_add_up_is_refused(url: str, folder: Path, key: str, message: str) -> None:
    tokenise(url, "mix", "corpus", folder, max_tokens=512, processes=1)
    store = Store.open(url).child("corpus")
    manifest = json.loads(store.get("manifest.json"))
    facts = manifest["report"]["conversations"]["sources"]["tools"]
    facts["taken"] += 1
    if key == "all":
        facts["heldout"] -= 1
    store.put("manifest.json", json.dumps(manifest).encode())
    with pytest.raises(CorpusError, match=message):
        corpus_card(Store.open(url), "corpus")


def test_a_card_of_a_set_that_was_sealed_without_its_held_out_numbers(url: str, folder: Path) -> None:
    tokenise(url, "mix", "corpus", folder, max_tokens=512, processes=1)
    whole = corpus_card(Store.open(url), "corpus")
    store = Store.open(url).child("corpus")
    manifest = json.loads(store.get("manifest.json"))
    for facts in manifest["report"]["conversations"]["sources"].values():
        del facts["heldout"]
    store.put("manifest.json", json.dumps(manifest).encode())
    assert corpus_card(Store.open(url), "corpus")["total"] == whole["total"]


def test_the_page_needs_nothing_else_and_escapes_what_others_wrote(url: str, folder: Path) -> None:
    tokenise(url, "mix", "corpus", folder, max_tokens=512, processes=1)
    page = card_html(corpus_card(Store.open(url), "corpus"))
    assert not re.search(r"<script|https?://|url\(|<link(?! rel=\"icon\" href=\"data:,\")", page)
    assert "<td>&lt;b&gt;</td>" in page
    assert "samples fewer than its quota asks for" in page


def test_a_card_that_would_lie_is_refused(url: str, folder: Path) -> None:
    tokenise(url, "mix", "corpus", folder, max_tokens=512, processes=1)
    store = Store.open(url).child("corpus")
    manifest = json.loads(store.get("manifest.json"))
    manifest["kinds"]["calls"]["tokens"] += 1
    store.put("manifest.json", json.dumps(manifest).encode())
    with pytest.raises(CorpusError, match="of kind 'calls', the manifest says"):
        corpus_card(Store.open(url), "corpus")


def test_a_card_of_a_built_mixture(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"))
    settings = CorpusSettings(sources=(GrammarSource(kind="lookup"),), samples=20)
    build(settings, tokenizer, store, "corpus")
    card = corpus_card(store, "corpus")
    assert (card["samples"], card["sources"], card["drops"]) == (20, [], [])
    assert "every record became a sample" in card_html(card)
