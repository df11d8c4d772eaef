from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import chromium
import pytest

# the double of a finished run is kept beside the unit tests of the room
sys.path.append(str(Path(__file__).parents[1] / "unit" / "measure"))


@pytest.fixture(scope="session")
def browser() -> Iterator[chromium.Browser]:
    program = chromium.find()
    if program is None:
        pytest.skip("no Chromium on PATH (Debian: apt-get install chromium)")
    with chromium.Browser(program) as running:
        yield running
