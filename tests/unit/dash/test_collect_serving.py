"""A served model by the page of its engine."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthouse.dash.collect import scrape
from drafthouse.dash.collect import serving as module
from drafthouse.dash.collect.scrape import quantile
from drafthouse.dash.collect.serving import ServerSource
from drafthouse.dash.model import ServerView
from tests.doubles.engine_metrics import EngineDouble, engine_double


class Time:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1.7e9 + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture(params=["vllm", "sglang"])
def engine(request: pytest.FixtureRequest) -> Iterator[EngineDouble]:
    with engine_double(request.param) as double:
        yield double


def source(double: EngineDouble, path: str = "") -> ServerSource:
    return ServerSource("served", double.url + path, "serve-qwen", 2.0, 3600.0)


def look(one: ServerSource) -> ServerView:
    one.ask()
    view = one.view()
    assert view.known.error is None
    return view


def test_what_an_engine_says(engine: EngineDouble, clock: Time) -> None:
    engine.running, engine.waiting, engine.cache = 3, 2, 0.25
    one = source(engine, "/v1/")
    first = look(one)
    assert (first.engine, first.model, first.up, first.job) == (engine.engine, "qwen", True, "serve-qwen")
    assert (first.running, first.waiting, first.cache_used) == (3, 2, 0.25)
    assert (first.requests_per_s, first.ttft_p50_s) == (None, None), "one reading tells no rate"
    for _ in range(10):
        engine.answer(0.2, tokens=41, rounds=16)
    clock.now += 20
    view = look(one)
    assert view.tokens_per_s == pytest.approx(410 / 20)
    assert view.requests_per_s == pytest.approx(0.5)
    assert view.acceptance_length == pytest.approx(40 / 16), "by counters, not by SGLang's gauge"
    assert view.ttft_p50_s == pytest.approx(0.175)
    assert view.ttft_p50_s is not None
    assert view.ttft_p95_s is not None
    assert 0.1 <= view.ttft_p50_s <= view.ttft_p95_s <= 0.25
    assert {one.name for one in view.series} >= {"tokens/s", "TTFT p50", "acceptance length", "running"}


def test_acceptance_is_that_of_the_last_minutes(engine: EngineDouble, clock: Time) -> None:
    one = source(engine)
    engine.answer(0.1, tokens=101, rounds=100)
    for _ in range(40):
        look(one)
        clock.now += 10
    engine.answer(0.1, tokens=401, rounds=100)
    assert look(one).acceptance_length == pytest.approx(4.0)


def test_an_engine_that_was_started_anew_counts_from_nothing(engine: EngineDouble, clock: Time) -> None:
    one = source(engine)
    engine.tokens = 1_000_000
    look(one)
    engine.tokens = 0
    clock.now += 10
    look(one)
    engine.tokens = 50
    clock.now += 10
    assert look(one).tokens_per_s == pytest.approx(5.0)


def test_sglang_counts_tokens_when_their_request_ends(clock: Time) -> None:
    with engine_double("sglang") as engine:
        engine.throughput = 123.0
        one = source(engine)
        look(one)
        clock.now += 10
        assert look(one).tokens_per_s == 123.0


def test_a_server_that_dies_keeps_its_last_values(clock: Time) -> None:
    with engine_double() as engine:
        one = source(engine)
        engine.running = 3
        look(one)
    one.ask()
    view = one.view()
    assert (view.up, view.running) == (False, 3)
    assert "it cannot be reached" in str(view.known.error)
    assert view.known.answered is not None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"status": 404}, "it answers 404; start the engine with its metrics on"),
        ({"status": 503}, "it answers 503"),
        ({"body": b"<html>{"}, "this is not a page of Prometheus"),
        ({"engine": "other"}, "these are not the metrics of vLLM or SGLang"),
    ],
)
def test_what_is_no_engine(changes: dict[str, Any], sentence: str) -> None:
    with engine_double() as engine:
        for name, value in changes.items():
            setattr(engine, name, value)
        one = source(engine)
        one.ask()
        view = one.view()
        assert not view.up
        assert sentence in str(view.known.error)
        assert engine.url in str(view.known.error)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_an_engine_cannot_tell_hides_nothing_else(engine: EngineDouble, clock: Time, odd: float) -> None:
    one = source(engine)
    look(one)
    engine.answer(0.2, tokens=41, rounds=16)
    engine.running = engine.cache = engine.accepted = engine.verify_calls = odd
    engine.waiting = 2
    clock.now += 20
    view = look(one)
    assert (view.running, view.cache_used, view.waiting) == (None, None, 2)
    assert view.tokens_per_s == pytest.approx(41 / 20)
    assert view.ttft_p50_s is not None
    assert not {"Infinity", "NaN"} & set(view.model_dump_json().replace(",", " ").replace(":", " ").split())


def test_a_page_of_any_size_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "LARGEST", 1000)
    with engine_double() as engine:
        engine.body = b"# " + b"x" * 2000
        one = source(engine)
        one.ask()
        assert "the page is larger than" in str(one.view().known.error)


def test_a_server_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    with engine_double() as engine:

        def hang(self: EngineDouble) -> str:
            over.wait(120)
            return self.model

        monkeypatch.setattr(EngineDouble, "page", hang)
        one = source(engine)
        one._client.timeout = 0.2
        began = time.monotonic()
        one.ask()
        assert time.monotonic() - began < 60
        over.set()
        assert "no answer in time" in str(one.view().known.error)


BOUNDS = [0.1, 0.5, 1.0, math.inf]


@given(
    st.lists(st.floats(0.0, 3.0), max_size=60),
    st.lists(st.floats(0.0, 3.0), min_size=1, max_size=60),
    st.floats(0.01, 1.0),
)
def test_a_quantile_lies_in_the_bucket_of_the_true_one(old: list[float], new: list[float], share: float) -> None:
    def counts(values: list[float]) -> dict[float, float]:
        return {bound: float(sum(value <= bound for value in values)) for bound in BOUNDS}

    found = quantile(share, counts(old), counts(old + new))
    exact = sorted(new)[max(0, math.ceil(share * len(new)) - 1)]
    low = max((bound for bound in [0.0, *BOUNDS] if bound < exact), default=0.0)
    high = min(bound for bound in BOUNDS if bound >= exact)
    assert found is not None
    assert found == 1.0 if math.isinf(high) else low <= found <= high


def test_no_observations_have_no_quantile() -> None:
    assert quantile(0.5, {}, {}) is None
    assert quantile(0.5, {1.0: 3.0, math.inf: 3.0}, {1.0: 3.0, math.inf: 3.0}) is None
    assert quantile(0.5, {}, {1.0: 3.0}) is None, "a histogram has a last bucket"
