from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.containers.debian import bootstrap, why_not

PACKAGES = "systemd,systemd-sysv,dbus,python3,python3-apt,ca-certificates,iproute2,procps,libavutil57"


@pytest.fixture(scope="session")
def node_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image of Debian with systemd."""
    if reason := why_not():
        pytest.skip(reason)
    archive = tmp_path_factory.mktemp("node") / "node.tar"
    bootstrap(PACKAGES, archive)
    name = f"drafthouse-test-node:{os.getpid()}"
    subprocess.run(["docker", "import", "--change", 'CMD ["/sbin/init"]', str(archive), name], check=True)
    archive.unlink()
    yield name
    subprocess.run(["docker", "rmi", "--force", name], check=True)
