"""`Store`: the few object operations that everything else is built from, over obstore.

Only create-only and overwriting puts are used, never compare-and-swap: a directory cannot do the latter
(obstore's LocalStore raises NotImplementedError), and create-only is enough for leases and done-markers.
"""

from __future__ import annotations

import builtins
import os
import random
import re
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self

import obstore
from obstore import exceptions

from drafthouse.errors import StoreError
from drafthouse.store.backend import Backend, parse
from drafthouse.store.body import DamagedObjectError
from drafthouse.store.files import write_at
from drafthouse.store.keys import check_key, check_prefix
from drafthouse.store.translate import ObjectMissingError, explain, is_transient

if TYPE_CHECKING:
    from obstore import ObjectMeta

_PART = 8 * 2**20  # bytes; S3 wants >= 5 MiB, except for the last part
_PARTS = 9000  # S3 allows 10,000 parts
_PARALLEL = 4  # parts in flight: at most _PARALLEL * part bytes are held in memory
_CREATE_TRIES = 6
_UPLOAD_TRIES = 2  # of the whole; the client has tried each part several times
_CLOCK = ".clock"
_STAGING = re.compile(r"#\d+$")  # LocalStore writes 'name#1', then renames


@dataclass(frozen=True)
class ObjectInfo:
    """Size (bytes) of an object and when it was last written, by the store's clock (time zone aware)."""

    key: str
    size: int
    last_modified: datetime


class Store:
    """A prefix inside an object store. Keys are relative to it; every method may be called from any thread.

    `get`, `put` and `create` are for small objects (markers, manifests); large ones go through `upload` and
    `download`, which hold a few parts in memory, whatever the size.

    All methods raise StoreError, in one sentence and within seconds, when the store cannot be reached,
    refuses the credentials or is full.
    """

    def __init__(self, backend: Backend, prefix: str = "") -> None:
        self._backend = backend
        self._prefix = prefix

    @classmethod
    def open(cls, url: str) -> Self:
        """Open ``file:///abs``, ``file:relative``, a plain path, ``memory://name`` or
        ``s3://bucket/prefix?endpoint=http://host:port&region=name``. Nothing is created or contacted.

        S3 credentials come from the environment only (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, …).

        Raises:
            StoreError: a URL that is none of these, that holds credentials, or S3 without credentials.
        """
        backend, prefix = parse(url)
        return cls(backend, prefix)

    @property
    def url(self) -> str:
        """The URL without options and credentials: for messages, and to tell stores apart."""
        return f"{self._backend.base_url}/{self._prefix}" if self._prefix else self._backend.base_url

    def child(self, prefix: str) -> Store:
        """The store under `prefix`, on the same connections."""
        return type(self)(self._backend, self._full(check_key(prefix)))

    def get(self, key: str, *, most: int | None = None) -> bytes:
        """The bytes of an object.

        Args:
            most: a larger one (bytes) is not fetched: it cannot be what was written there.

        Raises:
            ObjectMissingError: there is none.
            DamagedObjectError: it is larger than `most`.
        """
        full = self._key(key)
        with self._explained(key):
            client = self._backend.reader()
            if client is None:
                raise FileNotFoundError
            found = obstore.get(client, full)
            if most is not None and found.meta["size"] > most:
                raise DamagedObjectError(
                    f"this object of {found.meta['size']:,} bytes is not what was written there",
                    where=self._where(key),
                    fix="see who else writes there",
                )
            return bytes(found.bytes())

    def put(self, key: str, data: bytes) -> None:
        """Write an object, over whatever was there."""
        full = self._key(key)
        with self._explained(key):
            obstore.put(self._backend.writer(), full, data, mode="overwrite", use_multipart=False)

    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless the key is taken; True iff the stored bytes are `data`.

        Callers that race must differ in their bytes (a random token in the body): then one of them gets True.
        A put whose answer was lost is retried by the client and finds its own object (412); a 409 or no
        answer at all may mean that nothing landed. So the bytes are read back, and the put is repeated when
        nothing is there: repeating it with the same bytes is safe.
        """
        full = self._key(key)
        for attempt in range(_CREATE_TRIES):
            unknown: Exception | None = None
            try:
                client = self._backend.writer()
                obstore.put(client, full, data, mode="create", use_multipart=False)
            except exceptions.AlreadyExistsError:
                pass
            except (exceptions.BaseError, OSError, ValueError) as error:
                if not is_transient(error):
                    raise explain(error, self._where(key)) from error
                unknown = error
            else:
                self._settle(full)
                return True
            try:
                return self.get(key) == data
            except ObjectMissingError:
                if attempt == _CREATE_TRIES - 1 and unknown is not None:
                    raise explain(unknown, self._where(key)) from unknown
            except StoreError:
                if unknown is not None:  # the first failure is the cause; the read back met the same one
                    raise explain(unknown, self._where(key)) from unknown
                raise
            time.sleep(random.uniform(0.5, 1.0) * 0.05 * 2**attempt)
        raise StoreError(
            "the store says that the key is taken, and that nothing is there",
            where=self._where(key),
            fix="see the server's log, or use another store",
        )

    def head(self, key: str) -> ObjectInfo | None:
        """Size and time of an object, or None when there is none."""
        full = self._key(key)
        with self._explained(key):
            client = self._backend.reader()
            if client is None:
                return None
            try:
                return self._info(obstore.head(client, full))
            except FileNotFoundError:
                return None

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """The objects below the path `prefix`, sorted by key. Whole segments count: listing ``done/0001``
        finds ``done/0001/x`` but neither ``done/0001`` itself (use `head`) nor ``done/00012``."""
        full = self._full(check_prefix(prefix))
        with self._explained(prefix):
            client = self._backend.reader()
            if client is None:
                return []
            found = [self._info(meta) for chunk in obstore.list(client, full or None) for meta in chunk]
        seen = [info for info in found if info.key.rpartition("/")[2] != _CLOCK]
        return sorted(seen, key=lambda info: info.key)

    def delete(self, key: str) -> None:
        """Remove an object; no object there is fine."""
        full = self._key(key)
        with self._explained(key):
            client = self._backend.reader()
            if client is None:
                return
            try:
                obstore.delete(client, full)
            except FileNotFoundError:
                return

    def upload(self, key: str, path: Path) -> ObjectInfo:
        """Store the file at `path` under `key`: in parts (multipart on S3), visible only when complete.

        Use keys that nobody else writes: multipart uploads cannot be create-only. An upload that was killed
        leaves nothing visible; its parts stay until `sweep`. One that the server failed is sent once more as a whole.

        Raises:
            StoreError: the file cannot be read, the disk is full, or what arrived has another size.
        """
        full = self._key(key)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise StoreError(f"the file cannot be read ({error.strerror})", where=str(path)) from error
        for attempt in range(_UPLOAD_TRIES):
            try:
                obstore.put(
                    self._backend.writer(bulk=True),
                    full,
                    path,
                    mode="overwrite",
                    chunk_size=max(_PART, -(-size // _PARTS)),
                    max_concurrency=_PARALLEL,
                )
            except (exceptions.BaseError, OSError, ValueError) as error:
                # An upload that was completed and whose answer was lost is unknown (404) when the client asks again.
                if attempt == _UPLOAD_TRIES - 1 or not (is_transient(error) or "NoSuchUpload" in str(error)):
                    raise explain(error, self._where(key)) from error
                time.sleep(random.uniform(0.5, 1.0) * 2**attempt)
            else:
                break
        self._settle(full)
        info = self.head(key)
        if info is None or info.size != size:
            stored = "nothing" if info is None else f"{info.size} bytes"
            raise StoreError(f"{size} bytes were sent and {stored} arrived", where=self._where(key), fix="try again")
        return info

    def download(self, key: str, path: Path) -> None:
        """Copy an object to `path`: written beside it and renamed, so that `path` is complete or absent.

        Raises:
            ObjectMissingError: there is no such object.
            StoreError: the local disk is full, or the object ended early.
        """
        info = self.head(key)
        if info is None:
            raise ObjectMissingError("there is no such object", where=self._where(key))
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                self._fetch(key, info.size, file.fileno())
            part.replace(path)
        except OSError as error:
            raise explain(error, str(path)) from error
        finally:
            part.unlink(missing_ok=True)

    def local_path(self, key: str) -> Path | None:
        """Where the object lies (or would lie) on this machine's disk; None unless this is a `file:`
        store."""
        root = self._backend.root
        return None if root is None else root / self._key(key)

    def server_time(self) -> datetime:
        """The store's own clock: `last_modified` of an object that was just written (S3: whole seconds)."""
        # One key for everyone: a concurrent writer only makes the answer newer, and that is as true.
        self.put(_CLOCK, b"")
        info = self.head(_CLOCK)
        if info is None:
            raise StoreError("an object that was just written is not there", where=self._where(_CLOCK))
        return info.last_modified

    def probe(self) -> None:
        """Check that this store can hold leases: create, refuse a second create, read back, delete.

        Raises:
            StoreError: it cannot be written, or it ignores conditional puts (``If-None-Match: *``, RFC 9110
                section 13.1.2), so that two workers would both win one lease.
        """
        key = f".probe-{secrets.token_hex(8)}"
        first, second = secrets.token_bytes(16), secrets.token_bytes(16)
        created = self.create(key, first)
        try:
            if not created or self.create(key, second) or self.get(key) != first:
                raise StoreError(
                    "this store ignores conditional puts, so two workers would both win a lease",
                    where=self.url,
                    fix="use a store that honours If-None-Match (AWS, R2, MinIO, Ceph, SeaweedFS)",
                )
        finally:
            self.delete(key)

    def sweep(self, prefix: str = "", *, older_than_s: float, dry_run: bool = False) -> builtins.list[str]:
        """Remove what killed writers left half-written, untouched for `older_than_s` seconds by the store's clock:
        staging files of a `file:` store, unfinished multipart uploads on S3.

        Returns the keys that they were meant for (of staging files: with their ``#1``). With `dry_run` it only looks.

        Raises:
            StoreError: S3 without an access key in the environment; says what else removes uploads.
        """
        if self._backend.root is not None:
            return self._sweep_files(self._backend.root / self._full(check_prefix(prefix)), older_than_s, dry_run)
        return self._sweep_uploads(self._full(check_prefix(prefix)), older_than_s, dry_run)

    def _sweep_files(self, folder: Path, older_than_s: float, dry_run: bool) -> builtins.list[str]:
        if not folder.is_dir():
            return []
        now = self.server_time().timestamp()
        swept = []
        for path in sorted(folder.rglob("*")):
            try:
                if _STAGING.search(path.name) and now - path.stat().st_mtime > older_than_s:
                    if not dry_run:
                        path.unlink()
                    swept.append(str(path.relative_to(folder)))
            except FileNotFoundError:
                continue  # its writer finished, or another janitor was faster
        return swept

    def _sweep_uploads(self, full: str, older_than_s: float, dry_run: bool) -> builtins.list[str]:
        if self._backend.uploads is None:
            return []
        inside, swept = f"{full}/" if full else "", []
        with self._backend.uploads() as uploads:
            now = self.server_time()
            for upload in uploads.list(inside):
                if (now - upload.active).total_seconds() > older_than_s:
                    if not dry_run:
                        uploads.abort(upload)
                    swept.append(upload.key.removeprefix(inside))
        return sorted(swept)

    def _fetch(self, key: str, size: int, descriptor: int) -> None:
        full = self._key(key)
        client = self._backend.reader(bulk=True)

        def part(start: int) -> None:
            end = min(start + _PART, size)
            with self._explained(key):
                if client is None:
                    raise FileNotFoundError
                data = memoryview(obstore.get_range(client, full, start=start, end=end))
            if len(data) != end - start:
                raise StoreError(f"the object ended {end - start - len(data)} bytes early", where=self._where(key))
            write_at(descriptor, data, start)

        # Ranges instead of one stream: each has its own time-out and retries, and memory stays bounded.
        with ThreadPoolExecutor(_PARALLEL) as pool:
            for _ in pool.map(part, range(0, size, _PART)):
                pass

    def _settle(self, full: str) -> None:
        # LocalStore does not fsync (no switch in obstore 0.12): without it a power cut may lose a marker that
        # others have already seen, or keep a marker and lose its data.
        if self._backend.root is None:
            return
        path = self._backend.root / full
        try:
            for target in (path, path.parent):
                descriptor = os.open(target, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        except FileNotFoundError:
            return  # a later writer or a janitor has already removed it
        except OSError as error:
            raise explain(error, str(path)) from error

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix and key else self._prefix or key

    def _key(self, key: str) -> str:
        return self._full(check_key(key))

    def _where(self, key: str) -> str:
        return f"{self._backend.base_url}/{self._full(key)}"

    def _info(self, meta: ObjectMeta) -> ObjectInfo:
        path = meta["path"]
        key = path[len(self._prefix) + 1 :] if self._prefix else path
        return ObjectInfo(key, meta["size"], meta["last_modified"])

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        try:
            yield
        except (exceptions.BaseError, OSError, ValueError) as error:
            raise explain(error, self._where(key)) from error
