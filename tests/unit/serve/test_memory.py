"""The estimate against the figures that were published or computed by SGLang's own code."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafthouse.serve.facts import FolderFacts
from drafthouse.serve.memory import MemoryEstimate, estimate, prefill_graph_sizes, slots_per_request, static_fraction
from drafthouse.serve.profile import Sglang
from drafthouse.serve.shape import Shape
from tests.unit.serve import clean
from tests.unit.serve.clean import CONFIG, DFLASH, MTP, VLLM_DFLASH, VLLM_MTP, WEIGHT_BYTES

A6000_MIB = 49_140
MIB, GIB = 1024**2, 1024**3
SHIPPED = clean.profile(MTP)
FACTS = clean.facts(SHIPPED)


def of(name: str, *overrides: str, memory_mib: int = A6000_MIB) -> MemoryEstimate:
    profile = clean.profile(name, *overrides)
    facts = clean.facts(profile)
    found = estimate(profile, facts.model, facts.draft, memory_mib)
    assert found is not None
    return found


class TestShape:
    shape = Shape.of(CONFIG)

    def test_parameters_as_published(self) -> None:
        assert self.shape is not None
        assert self.shape.linear_layer() == pytest.approx(383.27e6, rel=1e-4)
        assert self.shape.full_layer() == pytest.approx(372.26e6, rel=1e-4)
        assert self.shape.parameters() == pytest.approx(26.896e9, rel=1e-4)
        assert self.shape.mtp_parameters() == pytest.approx(0.425e9, rel=1e-2)

    def test_bytes_as_published(self) -> None:
        assert self.shape is not None
        assert self.shape.kv_bytes(1, 2) == 64 * 1024
        assert self.shape.mtp_kv_bytes(1, 2) == 4 * 1024
        assert self.shape.state_bytes(1, 4) == pytest.approx(146.8 * MIB, rel=1e-3)
        assert self.shape.state_bytes(2, 4) == pytest.approx(73.4 * MIB, rel=1e-3)
        assert self.shape.state_bytes(2, 2) == pytest.approx(37.4 * MIB, rel=1e-3)

    def test_heads_fewer_than_gpus_are_replicated(self) -> None:
        assert self.shape is not None
        assert self.shape.kv_bytes(8, 2) == self.shape.kv_bytes(4, 2)

    @pytest.mark.parametrize(
        "config", [{}, {"text_config": {"num_hidden_layers": 4}}, {"num_experts": 8, "hidden_size": 1}]
    )
    def test_what_it_cannot_read(self, config: dict[str, Any]) -> None:
        assert Shape.of(config) is None

    def test_a_dense_model_has_no_state(self) -> None:
        text = {key: value for key, value in clean.TEXT.items() if not key.startswith(("linear", "full"))}
        shape = Shape.of({"text_config": text})
        assert shape is not None
        assert (shape.linear, shape.full, shape.state_bytes(1, 4)) == (0, 64, 0)


class TestSglang:
    def test_static_fraction_is_what_sglang_resolves(self) -> None:
        # SGLang 0.5.23's own resolver for this line on an A6000: 0.78605…
        profile = clean.profile(MTP, "engine.mem_fraction_static=null", "max_running_requests=null")
        assert static_fraction(profile, CONFIG, A6000_MIB) == pytest.approx(0.78605078125)

    def test_seven_requests_are_left_of_forty_eight(self) -> None:
        found = of(MTP, "engine.mem_fraction_static=null", "max_running_requests=null")
        assert (found.requested, found.effective) == (48, 7)
        # Published arithmetic splits the rest in a fixed ratio; SGLang gives tokens what states leave over.
        assert found.kv_tokens == pytest.approx(179_000, rel=0.08)
        assert found.full_length == 1

    def test_more_static_memory(self) -> None:
        found = of(MTP, "engine.mem_fraction_static=0.85", "max_running_requests=null")
        assert found.effective == 9
        assert found.kv_tokens == pytest.approx(229_000, rel=0.08)

    def test_half_the_state_makes_about_twice_the_requests(self) -> None:
        one = of(MTP, "max_running_requests=48")
        half = of(MTP, "max_running_requests=48", "engine.mamba_ssm_dtype=bfloat16")
        assert half.state_slot == pytest.approx(37.4 * MIB, rel=1e-3)
        assert 1.8 < half.effective / one.effective < 2.2

    def test_a_smaller_ratio_favours_context(self) -> None:
        wide, deep = of(MTP, "max_running_requests=48"), of(MTP, "engine.mamba_full_memory_ratio=0.4")
        assert deep.kv_tokens > wide.kv_tokens
        assert deep.effective < wide.effective

    def test_a_block_of_sixteen_costs_sixteen_copies(self) -> None:
        assert of(DFLASH, "max_running_requests=null").effective == 2
        assert of(DFLASH).draft_weights == pytest.approx(1.61 * GIB, rel=0.01)

    def test_explicit_slots(self) -> None:
        found = of(MTP, "engine.max_mamba_cache_size=20")
        assert (found.state_slots, found.effective) == (20, 4)

    @pytest.mark.parametrize(
        ("settings", "slots"),
        [
            ({}, 5),
            ({"overlap_schedule": False}, 3),
            ({"overlap_schedule": False, "page_size": 64}, 4),
            ({"mamba_radix_cache_strategy": "extra_buffer", "overlap_schedule": False}, 4),
            ({"mamba_radix_cache_strategy": "extra_buffer_lazy"}, 4),
            ({"mamba_radix_cache_strategy": "no_buffer"}, 3),
            ({"linear_attn_backend": "flashinfer"}, 3),
            ({"radix_cache": False}, 1),
        ],
    )
    def test_slots_a_request(self, settings: dict[str, Any], slots: int) -> None:
        assert slots_per_request(Sglang(version="0.5.23", **settings)) == slots

    def test_weights_by_shape_when_no_header_was_read(self) -> None:
        profile = clean.profile(MTP)
        found = estimate(profile, FolderFacts(config=CONFIG), None, A6000_MIB)
        assert found is not None
        assert found.weights * 2 == pytest.approx(WEIGHT_BYTES, rel=0.02)
        assert any("shape" in sentence for sentence in found.assumptions)

    def test_nothing_is_guessed_without_a_config(self) -> None:
        assert estimate(clean.profile(MTP), None, None, A6000_MIB) is None
        assert estimate(clean.profile(MTP), FolderFacts(problem="gone"), None, A6000_MIB) is None

    def test_a_drafter_that_is_not_known_is_said(self) -> None:
        profile = clean.profile(DFLASH)
        found = estimate(profile, clean.facts(profile).model, None, A6000_MIB)
        assert found is not None
        assert any("drafter is not counted" in sentence for sentence in found.assumptions)

    @settings(deadline=None)
    @given(memory=st.integers(40_000, 200_000), requests=st.integers(1, 64))
    def test_parts_never_exceed_the_whole(self, memory: int, requests: int) -> None:
        profile = SHIPPED.model_copy(update={"max_running_requests": requests})
        found = estimate(profile, FACTS.model, None, memory)
        assert found is not None
        assert found.effective <= requests
        if found.kv_tokens > 0:
            used = found.weights + found.draft_weights + found.reserve + found.state
            assert used + found.kv_tokens * found.kv_per_token <= found.static
            assert found.static < found.total


class TestVllm:
    def test_one_slot_a_drafted_token_and_one_for_the_known(self) -> None:
        found = of(VLLM_MTP)
        assert found.state == pytest.approx(8 * 4 * 73.4 * MIB, rel=1e-3)
        assert found.effective == 8

    def test_wide_blocks_leave_room_for_few(self) -> None:
        assert of(VLLM_DFLASH, "max_running_requests=64").effective < 16

    def test_a_small_gpu_holds_nothing(self) -> None:
        found = of(VLLM_MTP, memory_mib=24_000)
        assert (found.effective, found.full_length) == (0, 0)
        assert found.left < 0


def test_prefill_graphs() -> None:
    sizes = prefill_graph_sizes(4096)
    assert (len(sizes), sizes[0], sizes[-1]) == (50, 4, 4096)
    assert prefill_graph_sizes(8192)[-1] == 8192
    assert prefill_graph_sizes(100)[-1] == 96
