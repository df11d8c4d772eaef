from __future__ import annotations

import pytest

from drafthouse.loop import steps
from drafthouse.loop.folder import RunFolder
from drafthouse.target import Target
from tests.loop_run import Walked


@pytest.fixture(scope="module")
def walked_run(walked: Walked) -> RunFolder:
    return RunFolder.open(walked.path)


@pytest.fixture(scope="module")
def target(walked_run: RunFolder) -> Target:
    return steps.load_target(walked_run)
