"""How a state is kept: bf16 as the model computes it, or fp8 with one scale for each token and layer.

fp8 is e4m3 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning": 3 bits of mantissa, largest value 448). The
entries of states span orders of magnitude between tokens and layers, hardly within one state: with a scale of its own
an entry that is not tiny beside the largest is off by 1/16 at most, and half of the bytes are saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from drafthouse.states.spec import StatesSpec

LARGEST = 448.0
HIDDEN, LAST = "hidden_states", "last_hidden_state"
_SCALES = {HIDDEN: "hidden_scales", LAST: "last_scales"}
_CODES = {torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32"}


@dataclass(frozen=True)
class Element:
    """A tensor of a shard that holds states; `shape` is that of one token."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def code(self) -> str:
        """Its element type in a safetensors header."""
        return _CODES[self.dtype]

    @property
    def token_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def elements(spec: StatesSpec) -> tuple[Element, ...]:
    """What a run keeps: `hidden_states` [K, H] and `last_hidden_state` [H] of each token, with fp8 their scales
    `hidden_scales` [K] and `last_scales` [] behind them."""
    shapes = {HIDDEN: (len(spec.layer_ids), spec.hidden_size), LAST: (spec.hidden_size,)}
    if spec.dtype == "bf16":
        return tuple(Element(name, torch.bfloat16, shape) for name, shape in shapes.items())
    values = [Element(name, torch.float8_e4m3fn, shape) for name, shape in shapes.items()]
    return (*values, *(Element(_SCALES[name], torch.float32, shape[:-1]) for name, shape in shapes.items()))


def token_bytes(spec: StatesSpec) -> int:
    """Bytes that the states of one token take."""
    return sum(element.token_bytes for element in elements(spec))


def stored_bytes(spec: StatesSpec) -> int:
    """Bytes that one token takes in a shard: its states, its id (i32) and its mask (u8)."""
    return token_bytes(spec) + 5


def views(buffer: Tensor, spec: StatesSpec, tokens: int) -> tuple[Tensor, ...]:
    """The elements of `tokens` tokens inside a flat u8 buffer, in the order of `elements`, each `[tokens, …]`."""
    parts = dict(_places(spec, tokens))
    return tuple(
        buffer[parts[one.name] : parts[one.name] + tokens * one.token_bytes].view(one.dtype).view(tokens, *one.shape)
        for one in elements(spec)
    )


def _places(spec: StatesSpec, tokens: int) -> Iterator[tuple[str, int]]:
    begin = 0
    # Widest elements first: every tensor begins at a multiple of its element's size.
    for one in sorted(elements(spec), key=lambda element: -element.dtype.itemsize):
        yield one.name, begin
        begin += tokens * one.token_bytes


def quantise(states: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 `[…, H]` -> e4m3 `[…, H]` and fp32 scales `[…]`: state = value times scale. What is not finite stays so."""
    wide = states.float()
    scales = wide.abs().amax(-1) / LARGEST
    scales = torch.where(scales == 0, 1.0, scales)
    return (wide / scales.unsqueeze(-1)).to(torch.float8_e4m3fn), scales


def dequantise(values: Tensor, scales: Tensor) -> Tensor:
    """The inverse of `quantise`, bf16."""
    return (values.float() * scales.unsqueeze(-1)).to(torch.bfloat16)


def decoded(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Elements in their order -> `hidden_states` and `last_hidden_state`, bf16."""
    if len(parts) == 2:
        hidden, last = parts
        return hidden, last
    hidden, last, hidden_scales, last_scales = parts
    return dequantise(hidden, hidden_scales), dequantise(last, last_scales)
