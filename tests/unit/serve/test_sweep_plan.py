"""Which points a sweep has, and which it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthouse.serve.sweep_plan import CONCURRENCIES, CONTEXTS, Load, Place, SweepError, Target, places, server
from tests.unit.serve import clean
from tests.unit.serve.clean import CPU, MTP

LOAD = Load(output_tokens=256)


def target(context_length: int | None = None) -> Target:
    return Target(url="http://192.0.2.1:8000", model="m", tokenizer="t", context_length=context_length)


class TestPlaces:
    def test_the_usual_ones_are_a_cross(self) -> None:
        found = places(target(131_072), LOAD)
        assert {place.concurrency for place in found if place.context == CONTEXTS[0]} == set(CONCURRENCIES)
        assert {place.context for place in found if place.concurrency == 1} == set(CONTEXTS)
        assert len(found) == len(CONCURRENCIES) + len(CONTEXTS) - 1
        assert (CONCURRENCIES[0], CONCURRENCIES[-1], CONTEXTS[0], CONTEXTS[-1]) == (1, 100, 1024, 120 * 1024)

    def test_all_pairs(self) -> None:
        found = places(target(), LOAD, [10, 1, 10], [64, 32], full=True)
        assert [(one.context, one.concurrency) for one in found] == [(32, 1), (32, 10), (64, 1), (64, 10)]

    def test_usual_contexts_without_room_are_left_out(self) -> None:
        assert {place.context for place in places(target(17_000), LOAD)} == {1_024, 4_096, 16_384}

    def test_a_small_server_gets_the_longest_prompt_that_fits(self) -> None:
        assert {place.context for place in places(target(1_024), LOAD)} == {768}

    def test_a_context_that_was_asked_for_is_refused(self) -> None:
        with pytest.raises(SweepError, match=r"a prompt of 800 tokens and an answer of 256 .* stay at or below 768"):
            places(target(1_024), LOAD, contexts=[100, 800])

    @pytest.mark.parametrize("wrong", [[], [0], [4, -1]])
    def test_numbers_below_one(self, wrong: list[int]) -> None:
        with pytest.raises(SweepError, match="concurrency needs numbers above 0"):
            places(target(), LOAD, wrong)
        with pytest.raises(SweepError, match="context needs numbers above 0"):
            places(target(), LOAD, [1], wrong)

    def test_no_room_for_a_prompt_at_all(self) -> None:
        with pytest.raises(SweepError, match="context needs numbers above 0"):
            places(target(256), LOAD)

    @given(st.sets(st.integers(1, 500), min_size=1), st.sets(st.integers(1, 200_000), min_size=1), st.booleans())
    def test_both_axes_are_always_whole(self, counts: set[int], lengths: set[int], full: bool) -> None:
        found = places(target(), LOAD, list(counts), list(lengths), full=full)
        assert found == sorted(set(found))
        assert {one.concurrency for one in found if one.context == min(lengths)} == counts
        assert {one.context for one in found if one.concurrency == min(counts)} == lengths
        assert len(found) == (len(counts) * len(lengths) if full else len(counts) + len(lengths) - 1)

    def test_points_have_prompts_of_their_own(self) -> None:
        """Equal prompts would be answered by the prefix cache that the point before has filled."""
        found = places(target(), LOAD, full=True)
        assert len({place.seed(LOAD) for place in found}) == len(found)
        assert Place(1024, 10).requests(Load(rounds=4)) == 40


class TestServer:
    def test_of_a_profile(self) -> None:
        found = server(clean.profile(MTP))
        assert found.model_dump() == {
            "url": "http://127.0.0.1:30000",
            "model": "qwen3.6-27b",
            "tokenizer": "Qwen/Qwen3.6-27B",
            "context_length": 131_072,
        }

    def test_the_embedded_model_has_its_tokenizer_with_it(self) -> None:
        assert server(clean.profile(CPU), url="http://192.0.2.9:1/v1/").tokenizer.endswith("target/embedded")
        assert server(clean.profile(CPU), url="http://192.0.2.9:1/v1/").url == "http://192.0.2.9:1"

    def test_any_other(self) -> None:
        found = server(None, url="https://example.org/v1", model="m", tokenizer="t")
        assert (found.url, found.context_length) == ("https://example.org", None)

    def test_what_is_missing_without_a_profile(self) -> None:
        with pytest.raises(SweepError, match="without a profile --tokenizer is needed"):
            server(None, url="http://192.0.2.9", model="m")

    @pytest.mark.parametrize("url", ["192.0.2.9:8000", "ftp://192.0.2.9", "http://"])
    def test_no_address(self, url: str) -> None:
        with pytest.raises(SweepError, match="write the address as http://HOST:PORT"):
            server(None, url=url, model="m", tokenizer="t")
