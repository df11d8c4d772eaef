from __future__ import annotations

import secrets
from pathlib import Path

import pytest
import torch

from drafthouse.loop.tiny import embedded_target
from drafthouse.states import ExtractSettings, run_worker
from drafthouse.store import Store
from drafthouse.target import Target
from tests.doubles.extraction import MemoryCorpus, TinyTaps
from tests.fixtures_s3 import seaweed

__all__ = ["seaweed"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def store() -> Store:
    return Store.open(f"memory://{secrets.token_hex(8)}")


@pytest.fixture
def target() -> TinyTaps:
    return TinyTaps()


@pytest.fixture(scope="session")
def embedded() -> Target:
    """The target of the package, which the doubles of served engines run."""
    return Target.load(embedded_target())


@pytest.fixture(scope="session")
def described() -> Target:
    """The same without weights: what a worker has whose states a server computes."""
    return Target.load(embedded_target(), weights=False)


@pytest.fixture
def corpus() -> MemoryCorpus:
    return MemoryCorpus()


@pytest.fixture
def settings(tmp_path: Path) -> ExtractSettings:
    return ExtractSettings(
        layer_ids=(0, 2), rows=3, max_tokens=64, batch_tokens=128, pad_multiple=8, scratch=str(tmp_path)
    )


@pytest.fixture
def extracted(tmp_path: Path, corpus: MemoryCorpus, target: TinyTaps, settings: ExtractSettings) -> Store:
    """A finished run named `run` in a directory."""
    made = Store.open(str(tmp_path / "store"))
    run_worker(made, "run", corpus, target, settings)
    return made
