"""Extraction on CUDA through the worker: the CPU's states, brought to the host through pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from drafthouse.states import ExtractSettings, StatesReader, run_worker
from drafthouse.states.shard import ShardFile
from drafthouse.store import Store
from drafthouse.target import Target
from tests.gpu.texts import EMBEDDED, TextCorpus

# bfloat16 keeps 8 bits: float32 states that differ in their last bits may land on neighbouring values (one part
# in 128), and the smallest ones are dominated by the rounding of the sums they come from.
ROUNDING: dict[str, Any] = {"rtol": 2**-7, "atol": 2e-3}


def test_the_worker_captures_what_it_captures_on_the_cpu(
    states: Store,
    on_device: Target,
    corpus: TextCorpus,
    extraction: ExtractSettings,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: list[bool] = []
    write = ShardFile.write

    def watched(self: ShardFile, parts: Sequence[Tensor], samples: Sequence[int]) -> None:
        pinned.extend(part.is_pinned() for part in parts)
        write(self, parts, samples)

    monkeypatch.setattr(ShardFile, "write", watched)
    summary = run_worker(states, "device", corpus, on_device, extraction)
    assert summary.shards == len(corpus.shard_names)
    assert len(pinned) > 2 * summary.shards, "each shard comes in several batches"
    assert all(pinned) == (device.type == "cuda")

    expected, found = StatesReader(states, "cpu"), StatesReader(states, "device")
    assert found.samples == expected.samples
    assert found.tokens == expected.tokens
    for index in range(expected.samples):
        one, other = expected.sample(index), found.sample(index)
        assert torch.equal(one.input_ids, other.input_ids)
        assert torch.equal(one.loss_mask, other.loss_mask)
        torch.testing.assert_close(other.hidden_states, one.hidden_states, **ROUNDING)
        torch.testing.assert_close(other.last_hidden_state, one.last_hidden_state, **ROUNDING)


def test_a_bfloat16_target_gives_the_states_of_the_float32_one(
    states: Store, corpus: TextCorpus, extraction: ExtractSettings, device: torch.device
) -> None:
    """The dtype that large targets are served in: rounding of every layer, no other difference."""
    target = Target.load(EMBEDDED, device=device, dtype=torch.bfloat16)
    run_worker(states, "bfloat16", corpus, target, extraction)
    expected, found = StatesReader(states, "cpu"), StatesReader(states, "bfloat16")
    for index in range(expected.samples):
        one, other = expected.sample(index).hidden_states.float(), found.sample(index).hidden_states.float()
        assert float((one - other).norm()) < 0.03 * float(one.norm())
