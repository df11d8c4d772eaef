"""fp8 states: what rounding costs, and what must survive it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafthouse.states.elements import dequantise, elements, quantise, token_bytes, views
from drafthouse.states.spec import StatesSpec


def _spec(dtype: str) -> StatesSpec:
    return StatesSpec.model_validate(
        {
            "target": "t",
            "layer_ids": (0, 2, 5),
            "num_layers": 8,
            "hidden_size": 10,
            "dtype": dtype,
            "corpus": "c",
            "shards": 1,
            "max_tokens": 64,
        }
    )


@given(st.integers(-60, 60), st.integers(0, 1000))
def test_an_entry_near_the_largest_is_off_by_a_sixteenth_at_most(power: int, seed: int) -> None:
    """Whatever the magnitude: the scale belongs to the token. bf16 itself rounds by 1/256."""
    generator = torch.Generator().manual_seed(seed)
    states = (torch.rand(3, 64, generator=generator) + 0.01).mul(2.0**power).bfloat16()
    back = dequantise(*quantise(states)).float()
    assert float(((back - states.float()).abs() / states.float()).max()) <= 1 / 16 + 1 / 128


def test_zeros_stay_zeros_and_what_is_not_finite_stays_so() -> None:
    states = torch.tensor([[0.0, 0.0], [1.0, math.inf], [math.nan, 1.0]]).bfloat16()
    back = dequantise(*quantise(states))
    assert torch.equal(back[0], states[0])
    assert not torch.isfinite(back[1:]).all(dim=-1).any()


def test_the_largest_entry_is_kept() -> None:
    states = torch.tensor([[3.0, -768.0, 0.001]]).bfloat16()
    assert float(dequantise(*quantise(states))[0, 1]) == -768.0


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2 * 40), ("fp8", 40 + 4 * 4)])
def test_views_share_the_buffer_and_do_not_overlap(dtype: str, size: int) -> None:
    spec = _spec(dtype)
    assert token_bytes(spec) == size
    buffer = torch.zeros(7 * size + 2, dtype=torch.uint8)
    parts = views(buffer, spec, 7)
    assert [tuple(part.shape[1:]) for part in parts] == [one.shape for one in elements(spec)]
    for number, part in enumerate(parts, start=1):
        part.copy_(torch.full(part.shape, float(number)).to(part.dtype))
    for number, part in enumerate(parts, start=1):
        assert (part.float() == number).all()
    assert not buffer[-2:].any()
