from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from drafthouse.store import Store
from tests.doubles.s3_server import S3Double, s3_double
from tests.fixtures_s3 import s3_url, seaweed

__all__ = ["seaweed"]


@pytest.fixture(params=["memory", "file", pytest.param("s3", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of every kind; the S3 one is a real server."""
    if request.param == "memory":
        return Store.open(f"memory://{secrets.token_hex(8)}")
    if request.param == "file":
        return Store.open(str(tmp_path / "store"))
    opened = Store.open(s3_url(request.getfixturevalue("seaweed")))
    opened.probe()  # the server makes a bucket at the first write into it
    return opened


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Double]:
    """A fault-injecting S3 server."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with s3_double() as running:
        yield running
