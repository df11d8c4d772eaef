"""The canary against a server that answers well, and against every way in which servers have failed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from drafthouse.serve.canary import CanaryReport, canary, canary_of, long_text
from drafthouse.serve.errors import CanaryError
from drafthouse.serve.profile import CanarySpec, Question
from tests.doubles.openai_server import Behaviour, OpenAiDouble, openai_double
from tests.ports import free_port
from tests.unit.serve import clean

ANSWERS = {"capital": "Paris is the capital.", "17 + 25": "42"}
QUESTIONS = (
    Question(prompt="What is the capital of France?", answers=("paris",)),
    Question(prompt="What is 17 + 25?", answers=("42", "forty-two")),
)


@pytest.fixture
def server() -> Iterator[OpenAiDouble]:
    with openai_double(Behaviour(answers=dict(ANSWERS))) as double:
        yield double


def spec(**changes: Any) -> CanarySpec:
    return CanarySpec(**{"questions": QUESTIONS, "resume_words": 300, "timeout_s": 5, **changes})


def failed(report: CanaryReport) -> dict[str, str]:
    """Sentence by name of the checks that did not pass."""
    assert report.passed == all(check.passed for check in report.checks)
    return {check.name: check.sentence for check in report.checks if not check.passed}


class TestAlive:
    def test_everything_is_proven(self, server: OpenAiDouble) -> None:
        report = canary(server.url, spec(), speculates=True)
        assert failed(report) == {}
        assert [check.name for check in report.checks] == [
            "model",
            "question-1",
            "question-2",
            "known-answers",
            "json-schema",
            "resumed-prefix",
            "acceptance",
        ]
        assert (report.model, report.right, report.asked) == ("double", 2, 2)
        assert report.acceptance_length == pytest.approx(2.5)
        assert json.loads(json.dumps(report.as_dict()))["passed"] is True

    def test_what_is_asked(self, server: OpenAiDouble) -> None:
        canary(server.url + "/v1/", spec(chat_template_kwargs={"enable_thinking": False}))
        assert {request["temperature"] for request in server.requests} == {0}
        assert all(request["chat_template_kwargs"] == {"enable_thinking": False} for request in server.requests)
        assert all(request["max_tokens"] > 0 for request in server.requests)
        schema = next(request for request in server.requests if "response_format" in request)
        assert schema["response_format"]["json_schema"]["schema"]["additionalProperties"] is False
        *_, first, resumed = server.requests
        assert resumed["messages"][0] == first["messages"][0], "the same prefix, or nothing is resumed"
        assert [message["role"] for message in resumed["messages"]] == ["user", "assistant", "user"]

    def test_a_prefix_of_the_length_that_was_asked_for(self) -> None:
        text = long_text(4000)
        assert len(text.split()) == pytest.approx(4000, rel=0.01)
        assert len(set(text.splitlines())) == len(text.splitlines())
        where = text.index("The code of the archive") / len(text)
        assert 0.4 < where < 0.6

    def test_parts_can_be_left_out(self, server: OpenAiDouble) -> None:
        report = canary(server.url, spec(json_schema=False, resume_words=0))
        assert {check.name for check in report.checks} == {"model", "question-1", "question-2", "known-answers"}
        assert report.acceptance_length is None
        assert report.passed

    @pytest.mark.parametrize("engine", ["vllm", "sglang", "sglang-gauge"])
    def test_acceptance_of_either_engine(self, server: OpenAiDouble, engine: Any) -> None:
        server.behaviour.engine = engine
        assert canary(server.url, spec(), speculates=True).acceptance_length == pytest.approx(2.5)

    def test_a_profile_s_own_canary(self) -> None:
        profile = clean.profile(clean.CPU)
        right = {question.prompt.splitlines()[-1]: question.answers[0] for question in profile.canary.questions}
        with openai_double(Behaviour(model="embedded", answers=right)) as server:
            report = canary_of(profile, server.url)
        assert failed(report) == {}
        assert report.acceptance_length == pytest.approx(2.5)


class TestDead:
    def test_lambda_lambda(self, server: OpenAiDouble) -> None:
        server.behaviour.text = "The answer is 42, Paris. " + "lambda " * 60
        found = failed(canary(server.url, spec()))
        assert {"question-1", "question-2", "known-answers", "json-schema", "resumed-prefix"} <= found.keys()
        assert found["question-1"].startswith("degenerate output: ")
        assert "lambda" in found["question-1"]

    @pytest.mark.parametrize("text", ["!" * 200, "", "的" * 100])
    def test_stuck_tokens(self, server: OpenAiDouble, text: str) -> None:
        server.behaviour.text = text
        assert "degenerate output" in failed(canary(server.url, spec()))["question-1"]

    def test_fluent_nonsense(self, server: OpenAiDouble) -> None:
        server.behaviour.answers = {"17 + 25": "42", "capital": "The capital is a fine word with seven letters."}
        found = failed(canary(server.url, spec()))
        assert found == {"known-answers": "1 of 2 answers are right, 2 needed"}
        assert canary(server.url, spec(min_right=0.5)).passed

    def test_drafts_that_are_never_accepted(self, server: OpenAiDouble) -> None:
        server.behaviour.acceptance = 1.0
        found = failed(canary(server.url, spec(), speculates=True))
        assert found == {"acceptance": "acceptance length 1.00 (vLLM counters), must be above 1"}

    def test_a_bar_of_the_profile(self, server: OpenAiDouble) -> None:
        assert "acceptance" in failed(canary(server.url, spec(min_acceptance=3), speculates=True))
        assert canary(server.url, spec(min_acceptance=2), speculates=True).passed

    def test_drafting_that_is_not_there_is_no_pass(self, server: OpenAiDouble) -> None:
        server.behaviour.acceptance = 0
        report = canary(server.url, spec(), speculates=True)
        assert failed(report) == {"acceptance": "the engine's metrics show no drafts"}
        assert report.checks[-1].passed is None

    def test_no_metrics(self, server: OpenAiDouble) -> None:
        server.behaviour.engine = "none"
        assert "/metrics answered 404" in failed(canary(server.url, spec(), speculates=True))["acceptance"]
        assert canary(server.url, spec()).passed, "without drafts they are not needed"

    def test_a_schema_that_is_not_followed(self, server: OpenAiDouble) -> None:
        server.behaviour.ignores_schema = True
        assert "does not follow the schema" in failed(canary(server.url, spec()))["json-schema"]

    def test_a_prefix_that_is_resumed_from_elsewhere(self, server: OpenAiDouble) -> None:
        server.behaviour.forgets = True
        assert "lost after resuming" in failed(canary(server.url, spec()))["resumed-prefix"]

    def test_too_slow(self, server: OpenAiDouble) -> None:
        held = server.behaviour.held = threading.Event()
        # Long enough for a busy machine to list its models in.
        slow = spec(questions=QUESTIONS[:1], timeout_s=3, json_schema=False, resume_words=0)
        found = failed(canary(server.url, slow))
        held.set()
        assert found == {
            "question-1": "no answer from /v1/chat/completions within 3 s",
            "known-answers": "0 of 1 answers are right, 1 needed",
        }

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"status": 500}, 'answered 500: {"error": "out of order"}'),
            ({"status": 503, "body": b""}, "answered 503"),
            ({"body": b"<html>"}, "not JSON"),
            ({"body": b"[]"}, "holds no message"),
            ({"body": b'{"choices": []}'}, "holds no message"),
            ({"body": b'{"choices": [{"message": null}]}'}, "holds no message"),
            ({"drop": True}, "/v1/chat/completions: "),
        ],
    )
    def test_answers_that_are_none(self, server: OpenAiDouble, changes: dict[str, Any], said: str) -> None:
        for name, value in changes.items():
            setattr(server.behaviour, name, value)
        found = failed(canary(server.url, spec()))
        assert said in found["question-1"]
        assert found["known-answers"].startswith("0 of 2")
        assert {"json-schema", "resumed-prefix"} <= found.keys()

    def test_another_model(self, server: OpenAiDouble) -> None:
        report = canary(server.url, spec(), model="qwen")
        assert failed(report) == {"model": "'qwen' is not served; the server lists double"}
        assert server.requests == [], "nothing is asked of a stranger"

    def test_nobody_there(self) -> None:
        report = canary(f"http://127.0.0.1:{free_port()}", spec())
        assert list(failed(report)) == ["model"]
        assert (report.model, report.right) == (None, 0)


class TestRefused:
    def test_switched_off(self) -> None:
        with pytest.raises(CanaryError, match="switched off"):
            canary("http://127.0.0.1:1", spec(enabled=False))

    @pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://127.0.0.1", "", "http://127.0.0.1:port"])
    def test_no_address(self, url: str) -> None:
        with pytest.raises(CanaryError, match="write it as http://HOST:PORT"):
            canary(url, spec())
