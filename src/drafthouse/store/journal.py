"""An append-only journal: what was done to the fleet, by whom, one create-only object an entry."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from drafthouse.errors import StoreError
from drafthouse.store.body import from_body, to_body
from drafthouse.store.objects import Store

_KEY = re.compile(r"(\d{15})-[0-9a-f]{16}")
_READERS = 16
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Entry:
    """What was appended, and when by the store's clock."""

    at: datetime
    body: dict[str, Any]


class Journal:
    """The journal of a store, under ``audit/<milliseconds>-<token>``.

    Entries are in the order of the store's times. S3 tells whole seconds: within one, the entries of one `Journal`
    keep their order and those of different processes have none.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._entries = store.child("audit")
        self._last = 0
        self._lock = threading.Lock()

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add `entry` (JSON-able; anyone who may read the store sees it). It is there for good when this returns.

        Raises:
            StoreError: the store did not take it.
        """
        body = to_body(entry)
        now = (self._store.server_time() - _EPOCH) // timedelta(milliseconds=1)
        with self._lock:
            self._last = now = max(now, self._last + 1)
        if not self._entries.create(f"{now:015d}-{secrets.token_hex(8)}", body):
            raise StoreError("an entry's key was taken", where=self._entries.url, fix="see who else writes there")

    def entries(self, newest: int | None = None) -> list[Entry]:
        """The last `newest` entries (none: all), the oldest first."""
        keys = [info.key for info in self._entries.list() if _KEY.fullmatch(info.key)]
        wanted = keys if newest is None else keys[max(0, len(keys) - newest) :]
        with ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(self._read, wanted))

    def _read(self, key: str) -> Entry:
        at = _EPOCH + timedelta(milliseconds=int(key.partition("-")[0]))
        return Entry(at, from_body(self._entries.get(key), f"{self._entries.url}/{key}"))
