from __future__ import annotations

import pytest
import torch

from tests.unit.decode.pairs import Pair, make_pair
from tests.unit.target.tiny_models import dense, hybrid


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def hybrid_pair() -> Pair:
    return make_pair(hybrid, seed=0)


@pytest.fixture(scope="session")
def dense_pair() -> Pair:
    return make_pair(dense, seed=0)


@pytest.fixture(scope="session", params=["hybrid", "dense"])
def pair(request: pytest.FixtureRequest) -> Pair:
    made: Pair = request.getfixturevalue(f"{request.param}_pair")
    return made
