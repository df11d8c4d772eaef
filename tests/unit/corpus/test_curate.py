"""A curation from files to sealed conversations: what is taken, what is left out and why, and that nothing of it
depends on processes, pieces or interruptions."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drafthouse.config import load
from drafthouse.corpus import choosing
from drafthouse.corpus import curate as curating
from drafthouse.corpus.conversations import ConversationSet
from drafthouse.corpus.curate import curate
from drafthouse.corpus.curation import CurationSettings, curation_file
from drafthouse.errors import ConfigError, CorpusError
from drafthouse.store import Store

CORPORA = Path(__file__).parents[3] / "inventory" / "corpora"
WORDS = [f"w{n}" for n in range(3000)]


def sentences(seed: int) -> Iterator[str]:
    draw = random.Random(seed)
    while True:
        yield " ".join(draw.choices(WORDS, k=14))


def write(path: Path, records: list[Any]) -> None:
    text = "".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    said = sentences(0)
    pairs = [(next(said), next(said)) for _ in range(150)]
    chats: list[Any] = [
        {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in pairs
    ]
    chats += [chats[3], "{broken", [1], {"conversations": [{"from": "human", "value": "only"}]}]
    near = json.loads(json.dumps(chats[5]))
    near["conversations"][1]["value"] += " more"
    write(tmp_path / "chats.jsonl", [*chats, near])
    write(tmp_path / "code.jsonl", [{"instruction": next(said), "output": next(said)} for _ in range(60)])
    (tmp_path / "eval.txt").write_text(f"xx {pairs[7][0]} yy\n", encoding="utf-8")
    return tmp_path


def settings(**changes: Any) -> CurationSettings:
    chats = {
        "type": "files",
        "name": "chats",
        "kind": "chat",
        "licence": "MIT",
        "format": "sharegpt",
        "paths": ["chats.jsonl"],
    }
    code = {
        "type": "files",
        "name": "code",
        "kind": "code",
        "licence": "Apache-2.0",
        "format": "alpaca",
        "paths": ["code*.jsonl"],
    }
    values: dict[str, Any] = {
        "name": "mix",
        "kinds": {"chat": {"quota": 100}, "code": {}},
        "sources": [chats, code],
        "filters": {"evaluation": ["eval.txt"]},
        "heldout_one_in": 8,
        "samples_per_shard": 32,
    }
    return CurationSettings.model_validate({**values, **changes})


def run(data: Path, place: str = "a", wanted: CurationSettings | None = None, **more: Any) -> dict[Any, Any]:
    return curate(
        wanted or settings(),
        str(data / f"store-{place}"),
        data / f"work-{place}",
        base=data,
        **{"processes": 1, **more},
    )


def texts(data: Path, name: str, place: str = "a") -> list[str]:
    given = ConversationSet(Store.open(str(data / f"store-{place}")), name)
    return [one.messages[0].content for shard in given.shard_names for one in given.shard(shard)]


def test_what_is_taken_and_what_is_left_out(data: Path) -> None:
    made = run(data)
    train = made["train"]
    assert train.kinds["chat"] == 100
    drops = train.drops["chats"]
    assert {reason: count for reason, count in drops.items() if not reason.startswith("over_quota")} == {
        "not_json": 1,
        "not_object": 1,
        "no_answer": 1,
        "duplicate": 1,
        "near_duplicate": 1,
        "contaminated": 1,
    }
    read = sum(facts["read"] for facts in train.sources.values())
    left = sum(sum(counts.values()) for counts in train.drops.values())
    assert read == 215
    assert train.samples + made["heldout"].samples + left == read  # nobody is lost without a word
    for name, facts in train.sources.items():
        assert facts["read"] == facts["taken"] + facts["heldout"] + sum(train.drops.get(name, {}).values())
    assert sum(facts["taken"] for facts in train.sources.values()) == train.samples
    assert sum(facts["heldout"] for facts in train.sources.values()) == made["heldout"].samples > 0
    assert train.sources["code"]["licence"] == "Apache-2.0"
    assert train.examples["chats"]["not_json"][0]["text"] == "{broken"
    assert [shard.samples for shard in train.shards][:-1] == [32] * (len(train.shards) - 1)


def test_one_record_of_many_levels_does_not_make_a_corpus_unreadable(data: Path) -> None:
    def calling(levels: int) -> str:
        arguments = '{"a": ' * levels + "1" + "}" * levels
        value = json.dumps(f'{{"name": "f", "arguments": {arguments}}}')
        return f'{{"data": [{{"from": "human", "value": "{levels}"}}, {{"from": "tool_call", "value": {value}}}]}}'

    levels = [100, 196, 250, 300, 940, 5000]
    plain = [f'{{"x": {"[" * n}{"]" * n}}}' for n in (940, 960, 970, 980, 985, 990, 50_000)]
    write(data / "chats.jsonl", [*map(calling, levels), *plain])
    write(data / "more.json", [])
    (data / "more.json").write_text(f"[{','.join([*map(calling, levels), *plain])}]", encoding="utf-8")
    source = settings().sources[0].model_copy(update={"paths": ("chats.jsonl", "more.json")})
    made = run(data, wanted=settings(kinds={"chat": {}}, sources=[source], filters={}, heldout_one_in=10**9))
    assert texts(data, "mix") == ["100"]
    drops = made["train"].drops["chats"]
    assert drops.pop("duplicate") == 1  # the one that is kept lies in both files
    assert sum(drops.values()) == 2 * len(levels + plain) - 2
    assert set(drops) == {"too_deep", "no_messages"}
    assert drops["too_deep"] >= 2 * 5
    assert all(one["text"] and one["detail"] for shown in made["train"].examples["chats"].values() for one in shown)


@pytest.mark.parametrize("changed", ["one", "two"])
def test_files_of_one_name_in_two_folders_are_both_watched(data: Path, changed: str) -> None:
    for folder in ("one", "two", "elsewhere"):
        (data / folder).mkdir()
        write(data / folder / "part.jsonl", [{"instruction": f"{folder} {n}?", "output": "yes, yes"} for n in range(9)])
    source = settings().sources[1].model_copy(update={"paths": ("one/*.jsonl", "two/*.jsonl")})
    wanted = settings(kinds={"code": {}}, sources=[source], filters={"near_duplicates": None})
    made = run(data, wanted=wanted)
    assert list(made["train"].sources["code"]["origin"]["files"]) == ["one/part.jsonl", "two/part.jsonl"]
    shutil.copytree(data / "one", data / "moved" / "one")
    shutil.copytree(data / "two", data / "moved" / "two")
    again = curate(wanted, str(data / "store-a"), data / "work-a", base=data / "moved", processes=1)
    assert again["train"] == made["train"], "it is the same corpus on another machine"
    write(data / changed / "part.jsonl", [{"instruction": "other", "output": "other words"}])
    with pytest.raises(CorpusError, match="another corpus has this name already"):
        run(data, wanted=wanted)


def test_a_held_out_question_is_not_trained_on(data: Path) -> None:
    made = run(data)
    train, heldout = texts(data, "mix"), texts(data, "mix-heldout")
    assert not set(train) & set(heldout)
    assert len(heldout) == made["heldout"].samples > 10


def test_kinds_are_mixed_and_not_one_after_the_other(data: Path) -> None:
    run(data)
    given = ConversationSet(Store.open(str(data / "store-a")), "mix")
    first = Counter(one.kind for one in given.shard(given.shard_names[0]))
    assert first["chat"] >= 12
    assert first["code"] >= 4


def test_pieces_and_slices_do_not_show(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = run(data, "a")
    monkeypatch.setattr(choosing, "_SLICE", 16)
    two = run(data, "b", piece_bytes=3000)
    assert one["train"].digest == two["train"].digest
    assert one["heldout"].digest == two["heldout"].digest
    assert one["train"].drops == two["train"].drops


def test_a_run_that_broke_off_reads_only_what_is_missing(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(data, "a", piece_bytes=3000)
    real, read = curating.stage, []

    def stage(job: Any) -> Any:
        if len(read) == 4:
            raise KeyboardInterrupt
        read.append(job.number)
        return real(job)

    monkeypatch.setattr(curating, "stage", stage)
    with pytest.raises(KeyboardInterrupt):
        run(data, "b", piece_bytes=3000)
    (folder,) = [path for path in (data / "work-b").iterdir() if path.is_dir()]
    stamps = {path: path.stat().st_mtime_ns for path in folder.glob("*.jsonl")}
    monkeypatch.setattr(curating, "stage", real)
    again = run(data, "b", piece_bytes=3000)
    assert again["train"].digest == whole["train"].digest
    kept = [path for path, stamp in stamps.items() if path.stat().st_mtime_ns == stamp]
    assert len(kept) == 4


def test_a_sealed_set_is_looked_up_and_not_made_again(data: Path) -> None:
    made = run(data)
    assert run(data)["train"] == made["train"]
    with pytest.raises(CorpusError, match="another corpus has this name already"):
        run(data, wanted=settings(seed=1))
    write(data / "code.jsonl", [{"instruction": "other", "output": "other words"}])
    with pytest.raises(CorpusError, match="another corpus has this name already"):
        run(data)


def test_seed_changes_choice_and_order(data: Path) -> None:
    run(data, "a")
    run(data, "b", settings(seed=1))
    assert set(texts(data, "mix", "a")) != set(texts(data, "mix", "b"))


def test_a_cap_and_a_quota_that_cannot_be_filled(data: Path) -> None:
    code = settings().sources[1].model_copy(update={"cap": 5})
    made = run(
        data,
        wanted=settings(kinds={"chat": {"quota": 500}, "code": {"quota": 9}}, sources=[settings().sources[0], code]),
    )
    assert made["train"].sources["code"]["taken"] == 5
    assert made["train"].short["code"] == 4
    assert made["train"].short["chat"] > 300


def test_an_optional_source_that_is_not_there_is_named(data: Path) -> None:
    gone = settings().sources[1].model_copy(update={"name": "gone", "paths": ("none.jsonl",), "optional": True})
    made = run(data, wanted=settings(sources=[*settings().sources, gone]))
    assert "there is no such file" in made["train"].sources["gone"]["missing"]


def test_a_long_conversation_ends_behind_the_last_answer_that_fits(data: Path) -> None:
    turns = [{"from": who, "value": f"{n} " + "x" * 50} for n, who in enumerate(["human", "gpt"] * 4)]
    endless = [{"from": "human", "value": "y" * 300}, {"from": "gpt", "value": "z"}]
    write(data / "long.jsonl", [{"conversations": turns}, {"conversations": endless}])
    source = settings().sources[0].model_copy(update={"paths": ("long.jsonl",), "cut_to_chars": 230})
    wanted = settings(kinds={"chat": {}}, sources=[source], heldout_one_in=10**9, filters={"near_duplicates": None})
    made = run(data, wanted=wanted)
    given = ConversationSet(Store.open(str(data / "store-a")), "mix")
    (one,) = given.shard(given.shard_names[0])
    assert [message.content[0] for message in one.messages] == ["0", "1", "2", "3"]
    assert made["train"].drops["chats"] == {"cut_to_nothing": 1}


def test_filters_by_length(data: Path) -> None:
    sizes = [5, 20, 30, 200]
    write(data / "code.jsonl", [{"instruction": "q" * size, "output": "a" * size} for size in sizes])
    write(data / "chats.jsonl", [{"data": ["q" * 9, f"a{turns}" * 9] * turns} for turns in (1, 3, 4)])
    filters = {"min_chars": 20, "max_chars": 300, "max_turns": 6, "near_duplicates": None}
    made = run(data, wanted=settings(filters=filters, heldout_one_in=10**9))
    assert made["train"].drops == {"code": {"too_many_chars": 1, "too_short": 1}, "chats": {"too_many_turns": 1}}
    assert made["train"].samples == 4


def test_a_source_in_a_store(data: Path) -> None:
    Store.open(str(data / "bucket")).child("code").put("part.jsonl", (data / "code.jsonl").read_bytes())
    source = {
        "type": "store",
        "name": "code",
        "kind": "code",
        "licence": "MIT",
        "format": "alpaca",
        "url": f"file://{data}/bucket/code",
    }
    made = run(data, wanted=settings(kinds={"code": {}}, sources=[source], filters={}))
    assert made["train"].samples + made["heldout"].samples == 60


def test_a_hub_that_cannot_be_reached(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(data / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    hub = {
        "type": "hub",
        "name": "far",
        "kind": "code",
        "licence": "MIT",
        "format": "alpaca",
        "repo": "a/b",
        "revision": "main",
        "files": ["*"],
    }
    with pytest.raises(CorpusError, match=r"far: a/b@main: the hub cannot be reached"):
        run(data, wanted=settings(kinds={"code": {}}, sources=[hub], filters={}))


def test_nothing_left_is_an_error_that_says_why(data: Path) -> None:
    with pytest.raises(CorpusError, match=r"no conversation is left \(.*too_short"):
        run(data, wanted=settings(filters={"min_chars": 5000}))


@pytest.mark.parametrize("gone", ["chats.jsonl", "eval.txt"])
def test_a_file_that_is_not_there(data: Path, gone: str) -> None:
    (data / gone).unlink()
    with pytest.raises(CorpusError, match=gone):
        run(data)


def test_a_damaged_shard_is_noticed(data: Path) -> None:
    run(data)
    store = Store.open(str(data / "store-a"))
    given = ConversationSet(store, "mix")
    key = given.manifest.shards[0].key
    store.child("mix").put(key, store.child("mix").get(key)[:-1])
    with pytest.raises(CorpusError, match="a shard of conversations is damaged"):
        given.shard(given.shard_names[0])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kinds": {"chat": {}}}, "kinds lacks 'code'"),
        ({"kinds": {"chat": {}, "code": {}, "x": {}}}, "no source belongs to the kind 'x'"),
        ({"sources": [settings().sources[0]] * 2, "kinds": {"chat": {}}}, "two sources are called 'chats'"),
        ({"heldout_one_in": 1}, "heldout_one_in"),
        ({"name": "A b"}, "name"),
    ],
)
def test_impossible_curations(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**values)


@pytest.mark.parametrize("path", sorted(CORPORA.glob("*.yml")), ids=lambda path: path.name)
def test_the_files_of_the_inventory_are_curations(path: Path) -> None:
    found = load(CurationSettings, path)
    assert found.name == path.stem
    assert curation_file(found.name, CORPORA) == path


def test_the_missions_mix_has_its_size() -> None:
    quotas = {name: kind.quota or 0 for name, kind in load(CurationSettings, CORPORA / "mission.yml").kinds.items()}
    assert quotas.pop("tool-calling") in range(114_000, 200_001)
    assert sum(quotas.values()) == 800_000


def test_an_unknown_key_of_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.yml"
    path.write_text((CORPORA / "offline.yml").read_text().replace("samples_per_shard", "per_shard"))
    with pytest.raises(ConfigError, match="unknown key 'per_shard'"):
        load(CurationSettings, path)
