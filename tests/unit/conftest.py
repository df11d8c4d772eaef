from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.loop_run import Walked, walk

# How long an example takes says what else the machine does, and nothing of the property.
settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Walked:
    """A finished run that nobody changes."""
    return walk(tmp_path_factory.mktemp("walked"))


@pytest.fixture
def run(walked: Walked, tmp_path: Path) -> Path:
    """A copy of the finished run, to damage or to go on with."""
    return Path(shutil.copytree(walked.path, tmp_path / "run"))
