from __future__ import annotations

import copy
from typing import Any

import pytest
from synthetic_report import make_report

from drafthouse.measure import Report, parse_report, render

_REPORT = make_report()


@pytest.fixture
def report() -> dict[str, Any]:
    """A fresh copy: a test may break it."""
    return copy.deepcopy(_REPORT)


@pytest.fixture(scope="session")
def parsed() -> Report:
    return parse_report(_REPORT)


@pytest.fixture(scope="session")
def html() -> str:
    return render(_REPORT)
