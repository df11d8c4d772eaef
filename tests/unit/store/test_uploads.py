"""Multipart uploads of killed writers, on a real S3 server: found, left alone while they live, aborted."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from drafthouse.errors import StoreError
from drafthouse.store import Board, Store
from drafthouse.store.uploads import Upload, Uploads
from tests.doubles.s3_server import S3Double
from tests.fixtures_s3 import s3_url

_WRITER = """
import os, sys, obstore
from obstore.store import S3Store

bucket, endpoint, key, end = sys.argv[1:]

def parts():
    yield bytes(5 * 2**20)
    yield bytes(5 * 2**20)
    print("sent", flush=True)
    if end == "kill":
        os.kill(os.getpid(), 9)
    sys.stdin.readline()
    yield b"z"

options = {"virtual_hosted_style_request": False, "client_options": {"allow_http": True}}
store = S3Store(bucket, endpoint=endpoint, region="us-east-1", **options)
obstore.put(store, key, parts(), chunk_size=5 * 2**20, max_concurrency=1)
"""


def _writer(url: str, key: str, end: str) -> subprocess.Popen[str]:
    path, _, query = url.partition("?")
    bucket, _, prefix = path.removeprefix("s3://").partition("/")
    endpoint = query.split("&")[0].removeprefix("endpoint=")
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, bucket, endpoint, f"{prefix}/{key}", end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "sent\n"
    return writer


def _killed(url: str, key: str) -> None:
    with _writer(url, key, "kill") as writer:
        assert writer.wait(120) == -9


def _listed(endpoint: str, bucket: str = "bucket", prefix: str = "") -> list[Upload]:
    with Uploads(bucket, endpoint, "us-east-1") as uploads:
        return list(uploads.list(prefix))


@pytest.mark.s3
def test_what_killed_writers_left_is_aborted(seaweed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = s3_url(seaweed)
    store, elsewhere = Store.open(url), Store.open(url.replace("?", "-2?"))
    store.probe()
    _killed(url, "runs/a/data/s@1/x=1+2,3:4~5.safetensors")
    _killed(url, "runs/b/data/big")
    _killed(url.replace("?", "-2?"), "runs/b/data/big")
    assert store.list() == []
    assert store.sweep(older_than_s=600) == [], "it may still go on"
    time.sleep(1.1)  # the server tells whole seconds
    exotic = "data/s@1/x=1+2,3:4~5.safetensors"
    sent = Uploads._send

    def one_a_page(uploads: Uploads, method: str, key: str, query: dict[str, str]) -> object:
        small = {"max-uploads": "1"} if "uploads" in query else {"max-parts": "1"} if method == "GET" else {}
        return sent(uploads, method, key, {**query, **small})

    with monkeypatch.context() as patched:
        patched.setattr(Uploads, "_send", one_a_page)
        assert store.sweep(older_than_s=0, dry_run=True) == [f"runs/a/{exotic}", "runs/b/data/big"]
    assert store.sweep("runs/a", older_than_s=0, dry_run=True) == [exotic]
    assert store.sweep("runs/a", older_than_s=0) == [exotic]
    assert store.sweep(older_than_s=0) == ["runs/b/data/big"], "nothing of another prefix"
    assert store.sweep(older_than_s=0) == []
    assert elsewhere.sweep(older_than_s=0) == ["runs/b/data/big"]


@pytest.mark.s3
def test_an_upload_that_goes_on_is_not_touched(seaweed: str) -> None:
    url = s3_url(seaweed)
    store = Store.open(url)
    with _writer(url, "data/big", "go on") as writer:
        assert store.sweep(older_than_s=60) == []
        writer.communicate("\n", timeout=120)
        assert writer.returncode == 0
    info = store.head("data/big")
    assert info is not None
    assert info.size == 10 * 2**20 + 1


@pytest.mark.s3
def test_the_janitor_of_a_run_aborts_its_uploads(seaweed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = s3_url(seaweed)
    board = Board(Store.open(url), "run", ttl_s=1)
    assert board.claim(["s"], "w") is not None
    _killed(url, "runs/run/data/s/000001-w.safetensors")
    assert board.janitor() == [], "not before it has been quiet for minutes"
    monkeypatch.setattr("drafthouse.store.board._QUIET_S", 0.0)
    time.sleep(2.1)
    assert board.janitor(dry_run=True) == ["data/s/000001-w.safetensors"]
    assert board.janitor() == ["data/s/000001-w.safetensors"]
    assert board.janitor() == []


@pytest.mark.s3
def test_wrong_credentials_are_told(seaweed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    with pytest.raises(StoreError, match=r"refused the credentials.*check AWS_ACCESS_KEY_ID") as caught:
        _listed(seaweed, "tests")
    assert "wrong-secret" not in str(caught.value)


def test_without_an_access_key_it_says_what_else_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/nowhere")
    store = Store.open("s3://bucket/x?endpoint=http://127.0.0.1:1")
    with pytest.raises(StoreError, match="lifecycle rule AbortIncompleteMultipartUpload"):
        store.sweep(older_than_s=0)


def test_nobody_listens(double: S3Double) -> None:
    with pytest.raises(StoreError, match="s3://bucket: the server cannot be reached"):
        _listed("http://127.0.0.1:1")


@contextmanager
def _answering(*pages: tuple[int, str]) -> Iterator[tuple[str, list[str]]]:
    """A server that answers the given pages in turn, the last one again and again."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = pages[min(len(asked), len(pages) - 1)]
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            return None

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ((501, "<Error><Code>NotImplemented</Code></Error>"), r"answered 501 \(NotImplemented\)"),
        ((404, "<Error><Code>NoSuchBucket</Code></Error>"), "no such bucket"),
        ((200, "<html>"), "not XML"),
        ((200, "<R><Upload><Key>k</Key></Upload></R>"), "lacks 'UploadId'"),
        ((200, "<R><Upload><Key>k</Key><UploadId>u</UploadId><Initiated>soon</Initiated></Upload></R>"), "no time"),
    ],
)
def test_strange_answers_are_sentences(double: S3Double, page: tuple[int, str], sentence: str) -> None:
    with _answering(page) as (endpoint, _), pytest.raises(StoreError, match=sentence):
        _listed(endpoint)


def test_pages_follow_the_markers_and_end(double: S3Double) -> None:
    first = "<R><IsTruncated>true</IsTruncated><NextKeyMarker>k</NextKeyMarker></R>"
    with _answering((200, first)) as (endpoint, asked):
        assert _listed(endpoint, prefix="p/") == []
    assert asked == ["/bucket?prefix=p%2F&uploads=", "/bucket?key-marker=k&prefix=p%2F&uploads="]
