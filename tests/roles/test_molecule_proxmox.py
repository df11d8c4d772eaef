"""The Molecule scenarios of the roles for Proxmox hosts: converge, idempotence, verify, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.roles.runs import needs_machine, passes

pytestmark = needs_machine


@pytest.mark.parametrize("role", ["preflight", "nvidia_driver", "vfio_binding", "lxc_gpu", "nvidia_userspace"])
def test_scenario(role: str, tmp_path: Path) -> None:
    passes(role, tmp_path)
