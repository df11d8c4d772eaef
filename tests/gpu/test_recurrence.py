"""All implementations of the gated delta rule that run on CUDA give the same states, at the heads of Qwen3.6-27B.

flash-linear-attention is tested where it is installed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from drafthouse.target import Target, recurrence
from drafthouse.target.recurrence import Kernel

TAPS = (0, 2, 5)
# Three recurrent layers, an attention layer, and again.
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 8,
    "vocab_size": 512,
}


def target(dtype: torch.dtype, device: torch.device) -> Target:
    torch.manual_seed(0)
    return Target(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE)).to(device, dtype))


def captured(by: Target, kernel: Kernel, length: int) -> torch.Tensor:
    ids = torch.randint(0, 512, (3, length), generator=torch.Generator().manual_seed(length))
    with recurrence.forced(kernel):
        return by.capture(ids, torch.full((3,), length), TAPS)


@pytest.mark.parametrize("length", [5, 64, 200])
def test_all_kernels_give_the_same_states(device: torch.device, length: int) -> None:
    """As near to float32 as the reference is, in bfloat16 too."""
    wide, narrow = target(torch.float32, device), target(torch.bfloat16, device)
    exact = captured(wide, "substitution", length)

    def off(states: torch.Tensor) -> list[float]:
        apart, size = (x.transpose(0, 2).flatten(1).norm(dim=-1) for x in (states.float() - exact, exact))
        return [float(part) for part in apart / size]

    reference = off(captured(narrow, "substitution", length))
    assert max(off(captured(wide, "chunks", length))) < 1e-4
    for kernel in recurrence.available():
        found = off(captured(narrow, kernel, length))
        assert max(found) < 0.03
        assert all(one < 1.5 * other + 1e-3 for one, other in zip(found, reference, strict=True))
