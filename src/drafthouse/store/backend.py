"""From a URL to obstore clients. One backend serves every child of a store.

`file:` directories are created at the first write only, so that opening a mistyped path leaves no trace.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from obstore import exceptions
from obstore.store import LocalStore, MemoryStore, S3Store

from drafthouse.errors import StoreError
from drafthouse.store.keys import check_prefix
from drafthouse.store.translate import explain

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

    from drafthouse.store.uploads import Uploads

# obstore's own default (10 tries, 3 minutes) makes a wrong endpoint look like a hang.
RETRIES: RetryConfig = {
    "max_retries": 6,
    "retry_timeout": timedelta(seconds=15),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=3), "base": 2},
}
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


@dataclass(frozen=True)
class Backend:
    """The clients behind a store: `small` for markers, `bulk` (long time-out) for parts of large objects."""

    kind: Literal["file", "memory", "s3"]
    base_url: str
    root: Path | None
    small: ObjectStore | None
    bulk: ObjectStore | None
    uploads: Callable[[], Uploads] | None = None
    """The bucket's unfinished uploads (S3 only); asks for keys in the environment only when it is called."""

    def reader(self, *, bulk: bool = False) -> ObjectStore | None:
        """The client to read with; None when nothing was ever written (a directory that does not exist)."""
        if self.root is not None:
            return LocalStore(prefix=self.root) if self.root.is_dir() else None
        return self.bulk if bulk else self.small

    def writer(self, *, bulk: bool = False) -> ObjectStore:
        """The client to write with; creates the directory of a `file:` store."""
        if self.root is not None:
            try:
                return LocalStore(prefix=self.root, mkdir=True)
            except (exceptions.BaseError, OSError) as error:
                raise explain(error, str(self.root)) from error
        client = self.bulk if bulk else self.small
        assert client is not None
        return client


def parse(url: str) -> tuple[Backend, str]:
    """Backend and key prefix of a store URL.

    Raises:
        StoreError: an unknown scheme, credentials inside the URL, or S3 without credentials in the
        environment.
    """
    if not url:
        raise StoreError("the store's URL is empty", fix="give a directory, file://, memory:// or s3://bucket/prefix")
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", url)
    if scheme is None:
        return _file(url)
    match scheme[1].lower():
        case "file":
            return _file(_file_path(url))
        case "memory":
            return _memory_backend(url)
        case "s3":
            return _s3(url)
        case other:
            raise StoreError(
                f"the scheme '{other}:' is not known",
                where=url,
                fix="use file://, memory:// or s3://bucket/prefix",
            )


def _file_path(url: str) -> str:
    rest = url[len("file:") :]
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host not in {"", "localhost"} or not slash:
            raise StoreError(
                f"'{host}' stands where the host is", where=url, fix="write file:///absolute or file:relative"
            )
        rest = "/" + path
    return unquote(rest)


def _file(path: str) -> tuple[Backend, str]:
    if not path:
        raise StoreError("the store's directory is empty", fix="write file:///absolute or file:relative")
    root = Path(path).expanduser().absolute()
    if root.exists() and not root.is_dir():
        raise StoreError("a store is a directory, and this is a file", where=str(root), fix="give its directory")
    return Backend("file", f"file://{root}", root, None, None), ""


def _memory_backend(url: str) -> tuple[Backend, str]:
    name, _, prefix = url.partition(":")[2].removeprefix("//").partition("/")
    if not name:
        raise StoreError("a memory store needs a name", where=url, fix="write memory://name")
    with _memory_lock:
        store = _memory.setdefault(name, MemoryStore())
    return Backend("memory", f"memory://{name}", None, store, store), check_prefix(prefix.strip("/"))


def _s3(url: str) -> tuple[Backend, str]:
    parts = urlsplit(url)
    if parts.username or parts.password or "@" in parts.netloc:
        raise StoreError(
            "credentials do not belong in a URL",
            where=f"s3://…{parts.path}",
            fix="set AWS_ACCESS_KEY_ID and so on",
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(set(options) - {"endpoint", "region"})
    bucket = f"s3://{parts.netloc}{parts.path}"
    if unknown:
        raise StoreError(
            f"the option '{unknown[0]}' is not known",
            where=bucket,
            fix="only endpoint and region can be given",
        )
    if not parts.netloc:
        raise StoreError("the bucket is missing", where=url, fix="write s3://bucket/prefix")
    endpoint = options.get("endpoint") or _first_of("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    if endpoint is not None:
        _check_endpoint(endpoint, bucket)
    if not any(os.environ.get(name) for name in _CREDENTIALS):
        # Without this, the client asks the cloud's metadata address, which hangs everywhere else.
        raise StoreError(
            "there are no S3 credentials in the environment",
            where=bucket,
            fix="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )
    small = _s3_client(parts.netloc, endpoint, options.get("region"), "15s", bucket)
    bulk = _s3_client(parts.netloc, endpoint, options.get("region"), "180s", bucket)
    region = options.get("region") or _first_of("AWS_REGION", "AWS_DEFAULT_REGION") or "us-east-1"
    uploads = partial(_uploads, parts.netloc, endpoint or f"https://s3.{region}.amazonaws.com", region)
    base = f"s3://{parts.netloc}"
    return Backend("s3", base, None, small, bulk, uploads), check_prefix(parts.path.strip("/"))


def _uploads(bucket: str, endpoint: str, region: str) -> Uploads:
    from drafthouse.store.uploads import Uploads  # brings an HTTP client, which only janitors need

    return Uploads(bucket, endpoint, region)


def _first_of(*names: str) -> str | None:
    return next((value for name in names if (value := os.environ.get(name))), None)


def _check_endpoint(endpoint: str, bucket: str) -> None:
    parts = urlsplit(endpoint)
    if parts.username or parts.password:
        raise StoreError(
            "credentials do not belong in the endpoint", where=bucket, fix="set AWS_ACCESS_KEY_ID and so on"
        )
    try:
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        valid = False
    if not valid:
        raise StoreError(
            f"the endpoint '{endpoint}' is not an address",
            where=bucket,
            fix="write http://host:port or https://host",
        )


def _s3_client(bucket: str, endpoint: str | None, region: str | None, timeout: str, where: str) -> S3Store:
    client: ClientConfig = {"connect_timeout": "3s", "timeout": timeout}
    if endpoint is not None and endpoint.startswith("http://"):
        client["allow_http"] = True
    config: dict[str, str] = {}
    if endpoint is not None:
        config["endpoint"] = endpoint.rstrip("/")
    if region:
        config["region"] = region
    try:
        return S3Store(
            bucket,
            virtual_hosted_style_request=False,  # clones and endpoints by address know path style only
            disable_bulk_delete=True,  # not every clone has DeleteObjects, and one key is deleted at a time
            client_options=client,
            retry_config=RETRIES,
            **config,  # type: ignore[arg-type]
        )
    except (exceptions.BaseError, ValueError) as error:
        raise explain(error, where) from error
