"""The Molecule scenarios of the roles for machines that run jobs: converge, idempotence, verify, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.roles.runs import needs_machine, passes

pytestmark = needs_machine


@pytest.mark.parametrize("role", ["container_engine", "job_host", "model_store"])
def test_scenario(role: str, tmp_path: Path) -> None:
    passes(role, tmp_path)
