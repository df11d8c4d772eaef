"""The gated delta rule of whole texts in chunks, as matrix products only: for training on a GPU.

Per value head, with S the state `[key_dim, value_dim]` and alpha_t = exp(g_t):

    S_t = alpha_t S_{t-1} + k_t u_t^T,   u_t = beta_t (v_t - alpha_t S_{t-1}^T k_t),   o_t = S_t^T q_t

Inside a chunk the u solve a unit lower triangular system (the WY form of Gated DeltaNet, arXiv 2412.06464); between
chunks the state is carried. Transformers' fallback solves the system by substitution, forward and backward, which
on a GPU takes longer than all the rest of a small model. Here the inverse is built by doubling its diagonal blocks,
ten products of 64 x 64, and its gradient is two more.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

# Log-decay in front of a text's first token: exp of it is nothing (4e-18), and sums with it stay accurate.
RESET = -40.0


class _UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 of strictly lower triangular L `[..., size, size]`; size a power of two."""

    @staticmethod
    def forward(ctx: Any, strict: Tensor) -> Tensor:
        """Block substitution: with X the inverse of the diagonal blocks of width b, those of width 2b are
        X - X (L between them) X. As stable as substitution, which the series I - L + L^2 - ... is not: powers of L
        reach 1e18 where the keys of a chunk are alike, as in padding."""
        size = strict.shape[-1]
        index = torch.arange(size, device=strict.device)
        inverse = torch.eye(size, dtype=strict.dtype, device=strict.device) - strict * _between(index, 1)
        width = 2
        while width < size:
            inverse = inverse - inverse @ (strict * _between(index, width)) @ inverse
            width *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(-1, -2)
        return cast(Tensor, -(turned @ grads[0] @ turned).tril(-1))


def _between(index: Tensor, width: int) -> Tensor:
    """True where a row is in the second and a column in the first half of one diagonal block of 2 x `width`."""
    block = index // width
    odd, pair = block % 2 == 1, block // 2
    return (pair[:, None] == pair) & odd[:, None] & ~odd


def unit_lower_inverse(strict: Tensor) -> Tensor:
    """Inverse of I + L for strictly lower triangular L `[..., size, size]` (entries elsewhere must be zero).

    Raises:
        ValueError: `size` is no power of two.
    """
    size = strict.shape[-1]
    if size & (size - 1):
        raise ValueError(f"the size of the system is {size}, not a power of two")
    inverse: Tensor = _UnitLowerInverse.apply(strict)  # type: ignore[no-untyped-call]
    return inverse


def chunked_delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk: int = 64) -> Tensor:
    """Outputs of every token, with gradients; what transformers' fallback gives, to float32 rounding.

    Args:
        query, key: `[rows, length, key_heads, key_dim]` float32, L2-normalised and the query scaled; consecutive value
            heads share a key head.
        value: `[rows, length, heads, value_dim]`; g (log-decay, at most 0) and beta: `[rows, length, heads]`. `RESET`
            as a token's g begins a new text at it.
        chunk: width of the triangular systems, a power of two.

    Returns:
        `[rows, length, heads, value_dim]` float32.

    Raises:
        ValueError: the length is no multiple of `chunk`.
    """
    rows, length, heads, width = value.shape
    if length % chunk:
        raise ValueError(f"rows of {length} tokens are no multiple of the chunk of {chunk}")
    groups = heads // key.shape[2]
    if groups > 1:
        query, key = query.repeat_interleave(groups, dim=2), key.repeat_interleave(groups, dim=2)
    # [rows * heads, chunks, chunk, ...]
    count = length // chunk
    query, key, value = (
        x.transpose(1, 2).reshape(rows * heads, count, chunk, x.shape[-1]) for x in (query, key, value)
    )
    g, beta = (x.transpose(1, 2).reshape(rows * heads, count, chunk) for x in (g, beta))
    beta = beta.unsqueeze(-1)

    cumulative = g.cumsum(-1)
    gamma = cumulative.exp().unsqueeze(-1)
    above = torch.ones(chunk, chunk, dtype=torch.bool, device=g.device).triu(1)
    # Masked before exp, which would overflow above the diagonal.
    decay = (cumulative.unsqueeze(-1) - cumulative.unsqueeze(-2)).masked_fill(above, -torch.inf).exp()
    turned = key.transpose(-1, -2)
    inverse = unit_lower_inverse((beta * decay * (key @ turned)).tril(-1))
    written = inverse @ (beta * value)
    forgotten = inverse @ (beta * gamma * key)
    kept = ((cumulative[..., -1:] - cumulative).exp().unsqueeze(-1) * key).transpose(-1, -2)
    fading = gamma[:, :, -1:]

    # Only this runs chunk by chunk; outputs are taken of all chunks at once.
    state = value.new_zeros(rows * heads, key.shape[-1], width)
    states, updates = [], []
    for at in range(count):
        update = written[:, at] - forgotten[:, at] @ state if at else written[:, at]
        states.append(state)
        updates.append(update)
        if at + 1 < count:
            state = state * fading[:, at] + kept[:, at] @ update
    output = (gamma * query) @ torch.stack(states, 1) + (decay * (query @ turned)) @ torch.stack(updates, 1)
    return output.reshape(rows, heads, length, width).transpose(1, 2)
