"""Tests of what only a CUDA device can show: the same numbers as the CPU's, by the device's own kernels.

Everything in this folder is marked `gpu` and skipped where there is no device. The CPU is the reference of each
test, computed beside it, so no recorded numbers can go stale.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from drafthouse.corpus import Prompt
from drafthouse.states import ExtractSettings, run_worker
from drafthouse.store import Store
from drafthouse.target import Target
from tests.gpu.texts import EMBEDDED, TAPS, TextCorpus, held_out_prompts, sample_corpus

# Triton's interpreter runs our kernels on the CPU: `make test-kernels`.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

# The CPU's side works on tensors so small that sixteen threads mostly wait for each other.
if torch.cuda.is_available():
    torch.set_num_threads(min(2, torch.get_num_threads()))


def why_not() -> str | None:
    """The reason to skip, None where there is a device."""
    return (
        None if INTERPRETED or torch.cuda.is_available() else "needs a CUDA device, torch.cuda.is_available() is False"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here, reason = Path(__file__).parent, why_not()
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device(DEVICE)


@pytest.fixture(scope="session")
def on_cpu() -> Target:
    """The embedded target in float32 on the CPU: the reference."""
    return Target.load(EMBEDDED)


@pytest.fixture(scope="session")
def on_device(device: torch.device) -> Target:
    """The same weights in float32 on the device."""
    return Target.load(EMBEDDED, device=device)


@pytest.fixture(scope="session")
def corpus(on_cpu: Target) -> TextCorpus:
    """Grammar conversations in shards."""
    return sample_corpus(on_cpu.tokenizer)


@pytest.fixture(scope="session")
def prompts(on_cpu: Target) -> list[Prompt]:
    """Held-out prompts of every grammar kind."""
    return held_out_prompts(on_cpu.tokenizer)


@pytest.fixture(scope="session")
def extraction() -> ExtractSettings:
    """Several batches a shard, so that copies overlap with the next batch."""
    return ExtractSettings(layer_ids=TAPS, rows=4, max_tokens=256, batch_tokens=1024)


@pytest.fixture(scope="session")
def states(
    tmp_path_factory: pytest.TempPathFactory, on_cpu: Target, corpus: TextCorpus, extraction: ExtractSettings
) -> Store:
    """A store that holds the states of the corpus as the run `cpu`."""
    store = Store.open(str(tmp_path_factory.mktemp("states")))
    run_worker(store, "cpu", corpus, on_cpu, extraction)
    return store
