from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.doubles.nodes import Fleet, Node, missing
from tests.fixtures_s3 import s3_url, serve
from tests.fleet.operator import Operator, heal


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three nodes for the whole session. Who kills, cuts or rekeys one brings it back (`healthy` does)."""
    lacking = missing()
    if lacking is not None:
        pytest.skip(f"nodes need {lacking}")
    with Fleet(3, tmp_path_factory.mktemp("fleet")) as running:
        yield running


@pytest.fixture
def healthy(fleet: Fleet) -> Iterator[Fleet]:
    """The nodes, for tests that harm them: afterwards every node is joined, alive and known by its key again, and no
    job of the test stands in the inventory: `fab` reads all of them."""
    yield fleet
    heal(fleet)
    for name in ("jobs", "profiles"):
        shutil.rmtree(fleet.inventory / name, ignore_errors=True)
    fleet.write_inventory()


@pytest.fixture
def node(fleet: Fleet) -> Node:
    """A node that the test leaves as it was."""
    return fleet.nodes[0]


@pytest.fixture(scope="session")
def fleet_s3(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Endpoint of an S3 server (SeaweedFS) that nodes reach; `tests.fixtures_s3.s3_url` makes a store's URL of it."""
    with serve(tmp_path_factory.mktemp("seaweed"), fleet.controller_address) as endpoint:
        yield endpoint


@pytest.fixture
def operator(healthy: Fleet, fleet_s3: str) -> Iterator[Operator]:
    """An operator with a store of his own; what `fab` said is shown when the test fails."""
    found = Operator(healthy, s3_url(fleet_s3))
    healthy.write_inventory(fleet_store=found.store)
    yield found
    print("\n".join(found.transcript))
