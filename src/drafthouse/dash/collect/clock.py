"""The time by a store's own clock, told without writing to the store.

A `file:` store's times are given by this machine (of a file system that is mounted over a network: by its server). An
S3 server puts its time into every answer, also into one that refuses an anonymous request (``Date``, RFC 9110 section
6.6.1): whole seconds, and half of the round trip is unknown. Whatever that says, an object's time cannot lie in the
future, so the newest time that was seen pushes the clock forward. Ages are right to about two seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from urllib.parse import parse_qsl, urlsplit

import httpx2

ASK_EVERY_S = 300.0
_TIMEOUT_S = 3.0
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")


class StoreClock:
    """The clock of the store with this URL. A server is asked again every few minutes; in between this machine's own
    clock counts on."""

    def __init__(self, url: str, environment: Mapping[str, str] = os.environ) -> None:
        self._endpoint = _endpoint(url, environment)
        self._ahead = timedelta(0)  # of the store's clock against this machine's
        self._asked: float | None = None

    def now(self) -> datetime:
        """The store's time, as well as it is known."""
        if self._endpoint and (self._asked is None or time.monotonic() - self._asked > ASK_EVERY_S):
            self._asked = time.monotonic()
            self._ask(self._endpoint)
        return datetime.now(UTC) + self._ahead

    def seen(self, newest: datetime | None) -> None:
        """The store has shown an object of this time."""
        if newest is not None:
            self._ahead = max(self._ahead, newest - datetime.now(UTC))

    def _ask(self, endpoint: str) -> None:
        before = datetime.now(UTC)
        try:
            said = httpx2.head(endpoint, timeout=_TIMEOUT_S).headers.get("Date")
            told = parsedate_to_datetime(said or "")
        except (httpx2.HTTPError, ValueError):
            return  # this machine's clock has to do
        middle = before + (datetime.now(UTC) - before) / 2
        self._ahead = told.astimezone(UTC) + timedelta(seconds=0.5) - middle


def _endpoint(url: str, environment: Mapping[str, str]) -> str | None:
    """Where an S3 store is served; None for other stores."""
    parts = urlsplit(url)
    if parts.scheme != "s3":
        return None
    options = dict(parse_qsl(parts.query))

    def first(*names: str) -> str | None:
        return next((value for name in names if (value := environment.get(name))), None)

    region = options.get("region") or first(*_REGIONS) or "us-east-1"
    return options.get("endpoint") or first(*_ENDPOINTS) or f"https://s3.{region}.amazonaws.com"
