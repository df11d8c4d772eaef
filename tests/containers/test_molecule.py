"""Roles on a real Debian with systemd, in a container of the Docker Engine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.roles.runs import run

pytestmark = pytest.mark.containers


def test_engine_and_job_host_converge_stay_and_go(node_image: str, tmp_path: Path) -> None:
    done = run(
        *("molecule", "-c", ".config/molecule/config.yml", "test", "--scenario-name", "docker"),
        timeout_s=900,
        MOLECULE_EPHEMERAL_DIRECTORY=str(tmp_path),
        NODE_IMAGE=node_image,
        NODE_NAME=f"drafthouse-test-{os.getpid()}",
    )
    assert done.rc == 0, done.text[-6000:]
    assert done.counts("node")["failed"] == 0
