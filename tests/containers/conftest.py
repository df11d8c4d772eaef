from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
PACKAGES = "systemd,systemd-sysv,dbus,python3,python3-apt,ca-certificates,iproute2,procps"


@pytest.fixture(scope="session")
def node_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image of Debian with systemd, bootstrapped from the distribution's packages: no hub is needed."""
    if os.geteuid() != 0:
        pytest.skip("an image is bootstrapped by root only")
    for program in ("docker", "mmdebstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (make container-packages)")
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no Docker Engine answers")
    archive = tmp_path_factory.mktemp("node") / "node.tar"
    trimmed = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("man", "doc", "locale")]
    # The machine's own sources where it is a Debian, with their mirror; else the distribution's main archive.
    sources = [str(SOURCES)] if SOURCES.is_file() else []
    subprocess.run(
        [
            *("mmdebstrap", "--quiet", "--variant=minbase", "--dpkgopt=force-unsafe-io", *trimmed),
            *(f"--include={PACKAGES}", "bookworm", str(archive), *sources),
        ],
        check=True,
        timeout=600,
    )
    name = f"drafthouse-test-node:{os.getpid()}"
    subprocess.run(["docker", "import", "--change", 'CMD ["/sbin/init"]', str(archive), name], check=True)
    archive.unlink()
    yield name
    subprocess.run(["docker", "rmi", "--force", name], check=True)
