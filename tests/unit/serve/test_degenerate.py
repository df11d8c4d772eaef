from __future__ import annotations

import inspect as source_of
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafthouse.serve import degenerate
from drafthouse.serve.degenerate import (
    Loop,
    distinct_ratio,
    inspect,
    ngram_loop,
    split_words,
    stuck_characters,
)

PROSE = (
    "The sky looks blue because air scatters short waves of light more strongly than long ones. Sunlight holds all"
    " colours; on its way through the atmosphere the blue part is sent in every direction, so that it reaches the eye"
    " from all over the sky. At dusk the light travels further, most of the blue is lost on the way, and what is left"
    " is red and orange. The same rule, found by Rayleigh, explains why distant hills look bluish and why smoke does."
)
TABLE = "\n".join(["| name | size |", "|------|------|", *(f"| file{n} | {n * 37} |" for n in range(12))])
LIST = """1. Open the valve and wait five minutes.
2. Check the gauge; it should read two bar.
3. Close the drain below the boiler.
4. Start the pump and listen for air in the pipes.
5. Open the valve of every radiator, from the lowest floor up.
6. Wait until no air comes out, then close them again.
7. Check the gauge once more and add water if it fell."""
HONEST = {
    "prose": PROSE,
    "code": textwrap.dedent(source_of.getsource(degenerate)),
    "table": TABLE,
    "list": LIST,
    "ruler": "Title\n" + "=" * 60 + "\nand text",
    "short": "42",
    "counting": ", ".join(str(n) for n in range(1, 80)),
    "chinese": "天空呈蓝色是因为空气对短波光的散射比对长波光强得多，傍晚光线路程更长，剩下红色和橙色。",
    "json": '{"colour": "red", "count": 12}',
    "laughter": "Ha ha ha, that is a good one!",
}
# What broken servers have really written.
BROKEN = {
    "lambda": "lambda " * 40,
    "after a good start": "The answer is Paris. " + "lambda " * 40,
    "exclamation": "!" * 300,
    "one syllable": "defetetetetetetetetetetetetetetetetetetetetetetetetetetet",
    "phrase": "I think that " * 20,
    "sentence": "The capital of France is a city that lies on the river. " * 8,
    "chinese stuck": "的" * 60,
    "two words": "yes no " * 30,
    "endless ruler": "-" * 500,
    "collapsed vocabulary": " ".join("abcd"[(n * n + n // 3) % 4] for n in range(200)),
    "empty": "",
    "spaces only": " \n\n ",
}


class TestInspect:
    @pytest.mark.parametrize("text", HONEST.values(), ids=HONEST)
    def test_honest_text_passes(self, text: str) -> None:
        assert inspect(text).reasons == ()

    @pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
    def test_broken_text_is_seen(self, text: str) -> None:
        verdict = inspect(text)
        assert verdict.degenerate
        assert all(verdict.reasons)

    def test_the_reason_names_the_unit(self) -> None:
        assert inspect(BROKEN["lambda"]).reasons[-1] == "'lambda' is repeated 40 times"
        assert "i think that" in inspect(BROKEN["phrase"]).reasons[-1]
        assert inspect("").reasons == ("the answer is empty",)

    def test_the_limit_is_the_caller_s(self) -> None:
        text = " ".join(f"w{n % 40}" for n in range(130))
        assert not inspect(text, min_distinct=0.3).degenerate
        assert inspect(text, min_distinct=0.7).degenerate

    @settings(deadline=None)
    @given(st.text(max_size=400))
    def test_it_judges_anything(self, text: str) -> None:
        verdict = inspect(text)
        assert 0 < verdict.distinct <= 1
        assert verdict.degenerate == bool(verdict.reasons)


class TestDistinct:
    @settings(deadline=None)
    @given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=200), st.integers(1, 80))
    def test_the_poorest_window(self, words: list[str], window: int) -> None:
        windows = [words] if len(words) <= window else [words[i : i + window] for i in range(len(words) - window + 1)]
        assert distinct_ratio(words, window) == pytest.approx(min(len(set(w)) / len(w) for w in windows))

    def test_nothing_is_not_poor(self) -> None:
        assert distinct_ratio([]) == 1.0


class TestLoop:
    @settings(deadline=None)
    @given(
        unit=st.lists(st.sampled_from(["red", "green", "blue", "one", "two"]), min_size=1, max_size=12, unique=True),
        repeats=st.integers(8, 20),
        before=st.integers(0, 30),
    )
    def test_any_unit_is_found_wherever_it_begins(self, unit: list[str], repeats: int, before: int) -> None:
        repeats = max(repeats, -(-24 // len(unit)) if len(unit) > 1 else 8)
        loop = ngram_loop([f"w{n}" for n in range(before)] + unit * repeats)
        assert loop is not None
        assert loop.repeats == repeats
        assert sorted(loop.unit.split()) == sorted(unit)

    def test_the_shortest_unit_names_it(self) -> None:
        assert ngram_loop(["a", "b"] * 20) == Loop("a b", 20)

    @pytest.mark.parametrize("words", [[], ["a"], ["a"] * 7, ["a", "b"] * 11, [str(n) for n in range(100)]])
    def test_too_little_is_none(self, words: list[str]) -> None:
        assert ngram_loop(words) is None


class TestStuck:
    @pytest.mark.parametrize(
        ("text", "unit"),
        [("a" * 12, "a"), ("x" + "ab" * 12, "ab"), ("a" * 11, None), ("-" * 80, None), ("-" * 200, "-")],
    )
    def test_runs(self, text: str, unit: str | None) -> None:
        assert stuck_characters(text) == unit


def test_words_and_signs() -> None:
    assert split_words("Don't stop: 3.5!") == ["don", "'", "t", "stop", ":", "3", ".", "5", "!"]
