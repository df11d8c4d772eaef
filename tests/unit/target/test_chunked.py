"""The chunked delta rule equals transformers' fallback, forward and backward, whatever the decays and the lengths."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from drafthouse.target.chunked import RESET, chunked_delta_rule, unit_lower_inverse

# Largest error over the largest entry, or over one where all are smaller; both sides are float32.
TOLERANCE = 2e-5


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def ours(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk: int) -> Tensor:
    """Padded to whole chunks, as rows are: no decay and nothing written behind the end."""
    length = value.shape[1]
    extra = -length % chunk
    wide = [F.pad(x, (0, 0, 0, 0, 0, extra)) for x in (unit(query) * query.shape[-1] ** -0.5, unit(key), value)]
    narrow = [F.pad(x, (0, 0, 0, extra)) for x in (g, beta)]
    return chunked_delta_rule(wide[0], wide[1], wide[2], narrow[0], narrow[1], chunk)[:, :length]


def theirs(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    groups = value.shape[2] // key.shape[2]  # which older releases leave to the caller
    query, key = query.repeat_interleave(groups, dim=2), key.repeat_interleave(groups, dim=2)
    output, _ = torch_chunk_gated_delta_rule(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
    return cast(Tensor, output)


def assert_close(got: Tensor, wanted: Tensor, what: str = "output", decay: float = 0.0) -> None:
    """A chunk's log-decays sum up to 64 x `decay`: of two such sums float32 knows the difference the worse."""
    scale = float(wanted.detach().abs().max().clamp_min(1.0))
    assert float((got - wanted).detach().abs().max()) <= TOLERANCE * max(1.0, decay) * scale, what


def inputs(rows: int, length: int, groups: int, decay: float, alike: float, seed: int) -> list[Tensor]:
    """Random inputs; `decay`: size of -g, `alike`: how much all keys have in common."""
    draw = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(rows, length, 2, 16, generator=draw) for _ in range(2))
    key = (1 - alike) * key + alike * torch.randn(16, generator=draw)
    value = torch.randn(rows, length, 2 * groups, 8, generator=draw)
    g = -decay * torch.rand(rows, length, 2 * groups, generator=draw)
    beta = torch.sigmoid(4 * torch.randn(rows, length, 2 * groups, generator=draw))
    return [query, key, value, g, beta]


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 2),
    length=st.integers(1, 200),
    groups=st.sampled_from([1, 2]),
    decay=st.sampled_from([0.0, 1e-6, 0.05, 1.0, 30.0]),
    alike=st.sampled_from([0.0, 0.9, 1.0]),
    chunk=st.sampled_from([16, 64]),
    seed=st.integers(0, 2**20),
)
def test_outputs_and_gradients_equal_the_fallbacks(
    rows: int, length: int, groups: int, decay: float, alike: float, chunk: int, seed: int
) -> None:
    mine = [x.requires_grad_() for x in inputs(rows, length, groups, decay, alike, seed)]
    other = [x.detach().clone().requires_grad_() for x in mine]
    got, wanted = ours(mine[0], mine[1], mine[2], mine[3], mine[4], chunk), theirs(*other)
    assert_close(got, wanted, decay=decay)
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(seed + 1))
    (got * weight).sum().backward()  # type: ignore[no-untyped-call]
    (wanted * weight).sum().backward()  # type: ignore[no-untyped-call]
    for name, a, b in zip(("query", "key", "value", "g", "beta"), mine, other, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert_close(a.grad, b.grad, name, decay)


def test_a_reset_begins_a_new_text() -> None:
    """Two texts in one row, the border inside a chunk: each as alone."""
    parts = [inputs(1, length, 1, 0.1, 0.5, seed) for seed, length in ((1, 75), (2, 53))]
    together = [torch.cat(pair, dim=1) for pair in zip(*parts, strict=True)]
    together[3][:, [0, 75]] = RESET
    got = ours(together[0], together[1], together[2], together[3], together[4], 64)
    assert_close(got, torch.cat([theirs(*part) for part in parts], dim=1))


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_the_inverse_is_one_even_where_a_series_would_overflow(size: int) -> None:
    """All entries one: what a chunk of equal keys without decay gives. Its inverse has two diagonals."""
    strict = torch.ones(size, size).tril(-1)
    wanted = torch.eye(size) - torch.eye(size).roll(1, 0).tril(-1)
    assert torch.equal(unit_lower_inverse(strict), wanted)


def test_the_gradient_of_the_inverse_is_right() -> None:
    strict = torch.randn(3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tril(-1)
    strict.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: unit_lower_inverse(x.tril(-1)), (strict,))


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="size of the system is 6, not a power of two"):
        unit_lower_inverse(torch.zeros(6, 6))
    query, key, value, g, beta = inputs(1, 65, 1, 0.1, 0.0, 0)
    with pytest.raises(ValueError, match="rows of 65 tokens are no multiple of the chunk of 64"):
        chunked_delta_rule(query, key, value, g, beta)
