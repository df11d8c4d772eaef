"""The fault table: what kills a job, for every kind of job. (Moves and a killed supervisor are in the tests beside this
one; `benchmarks/fleet_faults.py` runs all of them.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import drafthouse
from tests.fixtures_s3 import s3_url
from tests.fleet.faults import extraction, fresh, serving, training, undisturbed
from tests.fleet.operator import Operator, SealedRun, sealed_run

pytestmark = [pytest.mark.faults, pytest.mark.s3]
FAULTS = ("worker killed", "all processes killed", "node dead", "node cut off")


@pytest.fixture(scope="module")
def sealed(fleet_s3: str, tmp_path_factory: pytest.TempPathFactory) -> SealedRun:
    return sealed_run(tmp_path_factory.mktemp("sealed"), s3_url(fleet_s3))


@pytest.fixture(scope="module")
def extracted(sealed: SealedRun, fleet_s3: str, tmp_path_factory: pytest.TempPathFactory) -> SealedRun:
    run = fresh(sealed, fleet_s3, tmp_path_factory.mktemp("extracted") / "copy")
    run.folder.mkdir()
    (run.folder / "run.yml").write_bytes(run.file.read_bytes())
    outcome = drafthouse("states", "extract", "--out", str(run.folder))
    assert outcome.code == 0, outcome
    return run


@pytest.fixture(scope="module")
def expected(extracted: SealedRun, fleet_s3: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return undisturbed(fresh(extracted, fleet_s3, folder / "copy"), folder / "run")


@pytest.mark.parametrize("fault", FAULTS)
def test_an_extraction_loses_no_shard_and_shows_none_twice(
    operator: Operator, sealed: SealedRun, fleet_s3: str, tmp_path: Path, fault: str
) -> None:
    found = extraction(operator, fresh(sealed, fleet_s3, tmp_path / "copy"), fault)
    assert (found.lost, found.duplicated) == (0, 0)
    assert found.redone <= 4


@pytest.mark.parametrize("fault", FAULTS)
def test_a_training_ends_with_the_losses_of_one_that_nothing_happened_to(
    operator: Operator,
    extracted: SealedRun,
    expected: dict[int, float],
    fleet_s3: str,
    tmp_path: Path,
    fault: str,
) -> None:
    found = training(operator, fresh(extracted, fleet_s3, tmp_path / "copy"), fault, expected)
    assert (found.lost, found.duplicated) == (0, 0), found.note


@pytest.mark.parametrize("fault", FAULTS)
def test_a_served_model_is_back_after_its_only_server_died(operator: Operator, tmp_path: Path, fault: str) -> None:
    found = serving(operator, fault, tmp_path)
    assert found.total - found.lost > 2
