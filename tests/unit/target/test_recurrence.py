"""The gated delta rule by chunks is transformers' reference, and CPU tensors never meet a GPU's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from drafthouse.target import Target, recurrence

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 4,
    "vocab_size": 64,
}


def drawn(rows: int, length: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(length)
    query, key = (torch.randn(rows, length, 2, 16, generator=random) for _ in range(2))
    value = torch.randn(rows, length, 4, 8, generator=random)
    g, beta = (torch.rand(rows, length, 4, generator=random) for _ in range(2))
    return {"query": query, "key": key, "value": value, "g": -g, "beta": beta}


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("length", [1, 16, 30, 64, 65, 200])
def test_chunks_give_what_the_reference_gives(length: int, normalise: bool) -> None:
    inputs = drawn(2, length)
    if not normalise:
        inputs["key"] = torch.nn.functional.normalize(inputs["key"], dim=-1)
    how = {"use_qk_l2norm_in_kernel": normalise}
    with recurrence.forced("substitution"):
        expected, _ = recurrence.gated_delta_rule(**inputs, **how)
    with recurrence.forced("chunks"):
        found, state = recurrence.gated_delta_rule(**inputs, **how)
    assert state is None
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_state_goes_in_and_out_by_the_reference() -> None:
    inputs = drawn(1, 40)
    begin = torch.randn(1, 4, 16, 8, generator=torch.Generator().manual_seed(0))
    with recurrence.forced("chunks"):
        _, after = recurrence.gated_delta_rule(
            **inputs, initial_state=begin, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        first, _ = recurrence.gated_delta_rule(**inputs, use_qk_l2norm_in_kernel=True)
    assert after is not None
    assert after.shape == begin.shape
    assert first.shape == (1, 40, 4, 8)


def test_a_target_on_the_cpu_runs_the_reference_and_layers_ask_us(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_cuda(*arguments: Any, **named: Any) -> Any:
        raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")

    monkeypatch.setattr(recurrence, "_chosen", only_cuda)  # as transformers chooses where fla is installed
    torch.manual_seed(0)
    target = Target(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE)))
    assert modeling_qwen3_5.torch_chunk_gated_delta_rule is recurrence.gated_delta_rule
    ids = torch.randint(0, 64, (2, 37), generator=torch.Generator().manual_seed(1))
    lengths = torch.full((2,), 37)
    states = target.capture(ids, lengths, (0, 2))
    with recurrence.forced("chunks"):
        other = target.capture(ids, lengths, (0, 2))
    assert not torch.equal(states, other)
    torch.testing.assert_close(other, states, rtol=1e-4, atol=1e-5)
