from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.loop_run import Walked, walk


@pytest.fixture(scope="session")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Walked:
    """A finished run that nobody changes."""
    return walk(tmp_path_factory.mktemp("walked"))


@pytest.fixture
def run(walked: Walked, tmp_path: Path) -> Path:
    """A copy of the finished run, to damage or to go on with."""
    return Path(shutil.copytree(walked.path, tmp_path / "run"))
