"""Answers of a served model, through a server that fails at random and workers that die."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from drafthouse.corpus import Conversation, Message, ToolCall
from drafthouse.corpus import conversations as sets
from drafthouse.corpus.conversations import ConversationManifest, ConversationSet
from drafthouse.corpus.endpoint import EndpointSettings, SamplingSettings, request_body
from drafthouse.corpus.regenerate import Regeneration
from drafthouse.errors import CorpusError, StatesError
from drafthouse.store import Store
from tests.doubles.flaky_openai_server import MODEL, Flaky, answer_of, flaky_openai_double

SAMPLING = SamplingSettings(model=MODEL, temperature=0.7, max_tokens=64)


def questions(*texts: str, history: bool = False) -> list[Conversation]:
    before = [Message(role="user", content="first"), Message(role="assistant", content="said")] if history else []
    old = Message(role="assistant", content="what the data set said")
    return [
        Conversation(id=f"q-{n}", kind="chat", messages=[*before, Message(role="user", content=text), old])
        for n, text in enumerate(texts)
    ]


def seal(store: Store, given: list[Conversation], per_shard: int = 8, name: str = "asked") -> None:
    lines = [one.model_dump_json(exclude_defaults=True).encode() + b"\n" for one in given]
    shards = [sets.put_shard(store.child(name), lines[at : at + per_shard]) for at in range(0, len(lines), per_shard)]
    manifest = ConversationManifest(
        schema_version=1,
        digest=sets.set_digest([shard.sha256 for shard in shards]),
        shards=tuple(shards),
        samples=len(given),
        split="train",
        kinds={"chat": len(given)},
        sources={"mine": {"licence": "MIT"}},
        drops={"mine": {"duplicate": 1}},
        settings={},
    )
    sets.seal(store, name, manifest)


def endpoint(double: Flaky, **more: Any) -> EndpointSettings:
    values = {"urls": (double.url,), "concurrency": 6, "timeout_s": 5.0, "pause_s": 0.002, "patience_s": 20.0}
    return EndpointSettings(**{**values, **more})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"))


def job(store: Store, **more: Any) -> Regeneration:
    return Regeneration(store, "asked", "answered", **{"sampling": SAMPLING, "ttl_s": 60.0, **more})


def answers(store: Store) -> dict[str, Message]:
    given = ConversationSet(store, "answered")
    return {one.id: one.messages[-1] for shard in given.shard_names for one in given.shard(shard)}


def test_every_question_is_answered_once_though_two_in_five_requests_fail(store: Store) -> None:
    texts = [f"question {n}" for n in range(60)]
    seal(store, questions(*texts, history=True))
    with flaky_openai_double(Flaky(failing=0.4)) as double:
        result = job(store).work(endpoint(double, tries=40))
        manifest = job(store).seal()
    assert double.failures.total() > 20
    assert len(double.failures) == 7  # in every way
    assert sum(result["failures"].values()) == double.failures.total()
    assert result["requests"] == double.failures.total() + 60
    assert set(double.answered.values()) == {1}
    assert double.most_at_once <= 6
    assert manifest.samples == 60
    found = answers(store)
    assert [found[f"q-{n}"].content for n in range(60)] == [answer_of(text) for text in texts]
    assert found["q-0"].reasoning_content == "Let me see."
    assert manifest.settings["sampling"]["temperature"] == 0.7
    assert manifest.sources == {"mine": {"licence": "MIT"}}


def test_what_gives_no_answer_is_counted_by_reason(store: Store) -> None:
    seal(store, questions("fine", "too long", "mute", "cut", "call", "cursed"))
    with flaky_openai_double() as double:
        job(store).work(endpoint(double, tries=3))
        manifest = job(store).seal()
    assert manifest.drops["(regeneration)"] == {"cut": 1, "empty": 1, "given_up": 1, "refused": 1}
    assert manifest.drops["mine"] == {"duplicate": 1}
    assert set(answers(store)) == {"q-0", "q-4"}
    assert answers(store)["q-4"].tool_calls == [ToolCall(name="look", arguments={"at": 1})]


def test_what_a_second_target_loses_is_added_to_what_the_first_one_lost(store: Store) -> None:
    seal(store, questions("fine", "cut", "mute"))
    with flaky_openai_double() as double:
        first = job(store, keep_cut=True)
        first.work(endpoint(double, tries=3))
        assert first.seal().drops["(regeneration)"] == {"empty": 1}
        second = Regeneration(store, "answered", "again", SAMPLING)
        second.work(endpoint(double, tries=3))
        manifest = second.seal()
    assert manifest.drops == {"mine": {"duplicate": 1}, "(regeneration)": {"cut": 1, "empty": 1}}
    assert manifest.samples == 1


def test_cut_answers_can_be_kept(store: Store) -> None:
    seal(store, questions("cut"))
    with flaky_openai_double() as double:
        job(store, keep_cut=True).work(endpoint(double))
    assert job(store, keep_cut=True).seal().samples == 1


def test_an_endpoint_that_goes_away_loses_nothing(store: Store) -> None:
    seal(store, questions(*(f"question {n}" for n in range(30))), per_shard=10)
    with flaky_openai_double(Flaky(dead_after=17)) as double:
        with pytest.raises(CorpusError, match="nobody has been answered for"):
            # Patience enough for a busy machine: what is on its way when it ends would be asked again.
            job(store).work(endpoint(double, patience_s=3.0, tries=1000))
        answered = dict(double.answered)
    assert len(answered) >= 17
    with pytest.raises(CorpusError, match="of 3 shards are not answered yet"):
        job(store).seal()
    with flaky_openai_double() as double:
        result = job(store).work(endpoint(double))
    assert result["resumed"] >= 7
    assert not set(double.answered) & set(answered)  # nothing is asked a second time
    assert len(double.answered) + len(answered) == 30
    assert job(store).seal().samples == 30


def test_two_workers_share_the_shards(store: Store) -> None:
    seal(store, questions(*(f"question {n}" for n in range(40))), per_shard=4)
    with flaky_openai_double(Flaky(failing=0.2)) as double:
        results: list[dict[str, Any]] = []
        threads = [
            threading.Thread(target=lambda name: results.append(job(store).work(endpoint(double), name)), args=(name,))
            for name in ("one", "two")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(result["shards"] for result in results) == 10
    assert job(store).seal().samples == 40
    assert not store.child("runs/answered").list("partial")


def test_a_run_is_bound_to_its_sampling(store: Store) -> None:
    seal(store, questions("one"))
    with flaky_openai_double() as double:
        job(store).work(endpoint(double))
        other = SAMPLING.model_copy(update={"temperature": 0.0})
        with pytest.raises(StatesError, match=r"sampling\.temperature: 0\.7 → 0\.0"):
            job(store, sampling=other).work(endpoint(double))
    assert job(store).seal() == job(store).seal()


def test_wrong_endpoints(store: Store) -> None:
    seal(store, questions("one"))
    with pytest.raises(CorpusError, match="no OpenAI-compatible server answers"):
        job(store).work(EndpointSettings(urls=("http://127.0.0.1:9",)))
    with flaky_openai_double() as double:
        other = SAMPLING.model_copy(update={"model": "other"})
        with pytest.raises(CorpusError, match="'other' is not served there, but flaky"):
            Regeneration(store, "asked", "x", other).work(endpoint(double))
    with pytest.raises(CorpusError, match="there are no conversations of this name"):
        Regeneration(store, "none", "y", SAMPLING).work(EndpointSettings(urls=("http://127.0.0.1:9",)))


def test_a_request_in_openais_form() -> None:
    call = ToolCall(name="f", arguments={"a": "ü"})
    given = Conversation(
        id="x",
        kind="k",
        messages=[
            Message(role="user", content="a"),
            Message(role="assistant", tool_calls=[call]),
            Message(role="tool", name="f", content="3"),
            Message(role="assistant", content="old"),
        ],
        tools=[{"name": "f"}],
    )
    sampling = SamplingSettings(model="m", top_k=5, template_variables={"enable_thinking": False})
    body = request_body(given, sampling)
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "tool"]
    assert body["messages"][1]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "ü"}'}
    assert body["messages"][1]["tool_calls"][0]["id"] == body["messages"][2]["tool_call_id"]
    assert body["tools"] == [{"type": "function", "function": {"name": "f"}}]
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert (body["top_k"], body["seed"], body["stream"]) == (5, 0, False)
