"""Multipart uploads that nobody finished: invisible in a bucket, and paid for until they are aborted.

obstore can neither list nor abort those of other processes, so the three requests are sent from here. Where keys are
not in the environment (roles of a cloud's machines), the bucket's own rule AbortIncompleteMultipartUpload does it:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpu-abort-incomplete-mpu-lifecycle-config.html
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self
from urllib.parse import urlsplit
from xml.etree import ElementTree

import httpx2

from drafthouse.errors import StoreError
from drafthouse.store.sigv4 import Credentials, sign
from drafthouse.store.translate import refusal

_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Upload:
    """An upload that was begun. `active` is when it was, or when its newest part arrived, by the store's clock."""

    key: str
    id: str
    active: datetime


class Uploads:
    """The unfinished multipart uploads of a bucket; a context manager that closes its connections.

    Args:
        bucket: its name.
        endpoint: scheme, host and port.
        region: as signatures name it.

    Raises:
        StoreError: there is no access key in the environment.
    """

    def __init__(self, bucket: str, endpoint: str, region: str) -> None:
        key, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
        if not key or not secret:
            raise StoreError(
                "listing unfinished uploads needs an access key in the environment",
                where=f"s3://{bucket}",
                fix="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the bucket a lifecycle rule"
                " AbortIncompleteMultipartUpload",
            )
        self._bucket, self._endpoint, self._region = bucket, endpoint.rstrip("/"), region
        self._credentials = Credentials(key, secret, os.environ.get("AWS_SESSION_TOKEN"))
        self._client = httpx2.Client(transport=httpx2.HTTPTransport(retries=2), timeout=_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def list(self, prefix: str) -> Iterator[Upload]:
        """Uploads to keys that begin with `prefix`."""
        markers = {"key-marker": "NextKeyMarker", "upload-id-marker": "NextUploadIdMarker"}
        for page in self._pages("", {"uploads": "", "prefix": prefix}, markers):
            for found in page.iterfind("{*}Upload"):
                key, identity = _text(found, "Key"), _text(found, "UploadId")
                begun = _time(_text(found, "Initiated"))
                yield Upload(key, identity, max([begun, *self._parts(key, identity)]))

    def abort(self, upload: Upload) -> None:
        """Throw the upload's parts away; it may be over already."""
        self._send("DELETE", upload.key, {"uploadId": upload.id})

    def _parts(self, key: str, identity: str) -> Iterator[datetime]:
        for page in self._pages(key, {"uploadId": identity}, {"part-number-marker": "NextPartNumberMarker"}):
            for part in page.iterfind("{*}Part"):
                yield _time(_text(part, "LastModified"))

    def _pages(self, key: str, query: Mapping[str, str], markers: Mapping[str, str]) -> Iterator[ElementTree.Element]:
        following: dict[str, str] = {}
        while True:
            page = self._send("GET", key, {**query, **following})
            if page is None:
                return
            yield page
            before = following
            following = {ours: text for ours, theirs in markers.items() if (text := page.findtext(f"{{*}}{theirs}"))}
            # A server that says "more" and does not say from where would be asked for ever.
            if page.findtext("{*}IsTruncated") != "true" or following in ({}, before):
                return

    def _send(self, method: str, key: str, query: Mapping[str, str]) -> ElementTree.Element | None:
        """The answer; None when what was asked for is not there (any more)."""
        where = f"s3://{self._bucket}/{key}" if key else f"s3://{self._bucket}"
        path = f"/{self._bucket}/{key}" if key else f"/{self._bucket}"
        host = urlsplit(self._endpoint).netloc
        target, headers = sign(method, host, path, query, self._credentials, self._region, datetime.now(UTC))
        try:
            answer = self._client.request(method, self._endpoint + target, headers=headers)
        except httpx2.HTTPError as error:
            raise StoreError(
                f"the server cannot be reached ({type(error).__name__})",
                where=where,
                fix="check the endpoint, the network and that the server runs",
            ) from error
        if answer.status_code == 404 and "NoSuchUpload" in answer.text:
            return None
        if not answer.is_success:
            raise refusal(answer.status_code, answer.text, where)
        try:
            return ElementTree.fromstring(answer.text) if answer.text.strip() else None
        except ElementTree.ParseError as error:
            raise StoreError("the server's list of uploads is not XML", where=where, fix="see its log") from error


def _text(element: ElementTree.Element, name: str) -> str:
    text = element.findtext(f"{{*}}{name}")
    if text is None:
        raise StoreError(f"the server's list of uploads lacks '{name}'", fix="abort old uploads by a lifecycle rule")
    return text


def _time(text: str) -> datetime:
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise StoreError(f"'{text[:60]}' in the server's list of uploads is no time", fix="see its log") from None
    return when if when.tzinfo else when.replace(tzinfo=UTC)
