"""A real Gated-DeltaNet target and a real corpus, through a worker, into a reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from drafthouse.corpus import CorpusReader, CorpusWriter, TokenSample
from drafthouse.errors import TargetError
from drafthouse.states import ExtractSettings, StatesReader, run_worker
from drafthouse.store import Store
from drafthouse.target import Target
from drafthouse.target.tiny import TinyShape


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    shape = TinyShape(hidden_size=32, intermediate_size=64, head_dim=8, linear_head_dim=8)
    model = transformers.Qwen3_5ForCausalLM(shape.to_config(300, 1, 0))
    return Target(model, identity="tiny-random")


@pytest.fixture
def corpus(tmp_path: Path) -> CorpusReader:
    store = Store.open(str(tmp_path / "corpora"))
    writer = CorpusWriter(store, "train", "no-tokenizer", samples_per_shard=4)
    random = np.random.RandomState(0)
    for index in range(10):
        length = int(random.randint(3, 90))
        ids = random.randint(2, 300, length).astype(np.int32)
        mask = np.ones(length, dtype=np.uint8)
        writer.add(TokenSample(f"sample-{index}", "code", ids, mask))
    writer.finish(split="train", settings={})
    return CorpusReader(store, "train")


def test_states_of_the_store_are_those_of_the_target(target: Target, corpus: CorpusReader, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "states"))
    settings = ExtractSettings(layer_ids=(0, 1, 3), rows=4, scratch=str(tmp_path))
    summary = run_worker(store, "run", corpus, target, settings)
    assert (summary.shards, summary.tokens) == (3, corpus.manifest.tokens)
    reader = StatesReader(store, "run")
    assert reader.spec.corpus == corpus.manifest.digest
    assert reader.spec.num_layers == target.num_layers
    wanted = {sample.id: sample for sample in corpus}
    assert {reader.sample(i).id for i in range(len(reader))} == set(wanted)
    for index in range(len(reader)):
        sample = reader.sample(index)
        ids = torch.from_numpy(wanted[sample.id].input_ids).long()[None]
        with torch.no_grad():
            states = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        for slot, layer in enumerate((0, 1)):
            expected = states.hidden_states[layer + 1][0]
            torch.testing.assert_close(sample.hidden_states[:, slot].float(), expected, rtol=0.02, atol=0.02)
        assert torch.equal(sample.hidden_states[:, 2], sample.last_hidden_state), "layer 3 is the last one"
        logits = target.lm_head(target.final_norm(sample.last_hidden_state.float()))
        torch.testing.assert_close(logits, states.logits[0], rtol=0.05, atol=0.05)


def test_fp8_keeps_the_states_within_a_sixteenth_in_half_of_the_bytes(
    target: Target, corpus: CorpusReader, tmp_path: Path
) -> None:
    store = Store.open(str(tmp_path / "states"))
    for dtype in ("bf16", "fp8"):
        settings = ExtractSettings(layer_ids=(0, 1, 3), dtype=dtype, scratch=str(tmp_path))
        run_worker(store, dtype, corpus, target, settings)
    wide, narrow = (StatesReader(store, dtype) for dtype in ("bf16", "fp8"))
    for index in range(len(wide)):
        exact, rounded = wide.sample(index), narrow.sample(index)
        assert rounded.hidden_states.dtype == torch.bfloat16
        for one, other in (
            (exact.hidden_states, rounded.hidden_states),
            (exact.last_hidden_state, rounded.last_hidden_state),
        ):
            error = (one.float() - other.float()).norm(dim=-1) / one.float().norm(dim=-1)
            assert 0 < float(error.max()) < 1 / 16
    sizes = {dtype: _data_bytes(store, dtype) for dtype in ("bf16", "fp8")}
    tokens, width = corpus.manifest.tokens, 32
    assert sizes["bf16"] - sizes["fp8"] == tokens * 4 * (width - 4), "a byte an entry less, four bytes a scale more"
    batch = next(narrow.batches(4, seed=0))
    assert batch.hidden_states.dtype == batch.last_hidden_state.dtype == torch.bfloat16


def _data_bytes(store: Store, run: str) -> int:
    """Bytes of all tensors of a run's shards, without headers."""
    total = 0
    for info in store.list(f"runs/{run}/data"):
        data = store.get(info.key)
        total += len(data) - 8 - int.from_bytes(data[:8], "little")
    return total


def test_a_layer_that_the_target_lacks(target: Target, corpus: CorpusReader) -> None:
    ids = torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(TargetError, match="decoder layers 0 to 3"):
        target.capture(ids, torch.tensor([4]), (0, 4))
