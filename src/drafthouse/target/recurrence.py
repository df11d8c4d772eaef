"""Which implementation of the gated delta rule a target's forward runs: chosen by where its tensors are.

Transformers chooses once, when it is imported: flash-linear-attention's kernels where that package is installed, else
a readable reference. The first cannot run on a CPU; the second pads every text to chunks of 64 and solves their
triangular systems by substitution. So here:

    fla           on CUDA, where the package is there
    chunks        on CUDA without it: matrix products in float32 (`chunked.py`), over shorter chunks where texts are
    substitution  elsewhere, and wherever a state comes in or goes out: transformers' reference

All three give the same states, to the rounding of the dtype (`tests/gpu/test_recurrence.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from drafthouse.target.chunked import chunked_delta_rule

Kernel = Literal["fla", "chunks", "substitution"]

_NAME = "torch_chunk_gated_delta_rule"
_CHUNKS = (16, 32, 64)
_chosen: Callable[..., Any] = getattr(modeling, _NAME)
_reference: Callable[..., Any] = getattr(_chosen, "__wrapped__", _chosen)
_forced: list[Kernel] = []


def available() -> list[Kernel]:
    """What can run on CUDA here, the default first."""
    cells = getattr(_chosen, "__closure__", None) or ()
    packages = {str(getattr(cell.cell_contents, "__module__", "")).partition(".")[0] for cell in cells}
    return ["fla", "chunks", "substitution"] if "fla" in packages else ["chunks", "substitution"]


def install() -> None:
    """Have transformers' Qwen3.5 layers ask here. Doing it again changes nothing."""
    setattr(modeling, _NAME, gated_delta_rule)


@contextmanager
def forced(kernel: Kernel) -> Iterator[None]:
    """Run that implementation whatever the device: for checks and measurements."""
    _forced.append(kernel)
    try:
        yield
    finally:
        _forced.pop()


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """In the place of transformers' function; see there for the arguments.

    Args:
        query, key: `[rows, length, key_heads, key_dim]`; value: `[rows, length, heads, value_dim]`.
        g: log-decay, at most 0; beta: both `[rows, length, heads]`.

    Returns:
        `[rows, length, heads, value_dim]`, and the state behind the last token where it was asked for.
    """
    if _forced:
        kernel = _forced[-1]
    elif query.is_cuda:
        kernel = available()[0]
    else:
        kernel = "substitution"
    stateless = initial_state is None and not output_final_state and others.get("cu_seqlens") is None
    if kernel == "chunks" and stateless:
        return _by_chunks(query, key, value, g, beta, normalise=use_qk_l2norm_in_kernel), None
    found: tuple[Tensor, Tensor | None] = (_chosen if kernel == "fla" else _reference)(
        query,
        key,
        value,
        g=g,
        beta=beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        **others,
    )
    return found


def _by_chunks(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, normalise: bool) -> Tensor:
    length = query.shape[1]
    chunk = next((size for size in _CHUNKS if length <= size), _CHUNKS[-1])
    q, k, v, decay, rate = (x.float() for x in (query, key, value, g, beta))
    if normalise:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * query.shape[-1] ** -0.5
    # Tokens behind the end: beta 0 writes nothing, and nobody reads their outputs.
    after = -length % chunk
    q, k, v, decay, rate = (F.pad(x, (0, 0) * (x.dim() - 2) + (0, after)) for x in (q, k, v, decay, rate))
    return chunked_delta_rule(q, k, v, decay, rate, chunk)[:, :length].to(query.dtype)
