"""obstore's exceptions as one sentence each: what is wrong, at which object, what to do."""

from __future__ import annotations

import re

from obstore import exceptions

from drafthouse.errors import StoreError

_FULL = ("No space left on device", "StorageFull", "Disk quota exceeded", "QuotaExceeded", "File too large")
_READ_ONLY = "Read-only file system"
_XML_CODE = re.compile(r"<Code>([^<]+)</Code>")
_STATUS = re.compile(r"status code: (\d{3})")


class ObjectMissingError(StoreError):
    """There is no object under the key that was asked for."""


def is_transient(error: Exception) -> bool:
    """True when the outcome of a write is unknown: no answer arrived, or the server failed (5xx)."""
    text = str(error)
    status = _STATUS.search(text)
    if status:
        return status[1].startswith("5")
    return "HTTP error" in text


def explain(error: Exception, where: str) -> StoreError:
    """The sentence for `error`, which obstore (or the file system) raised while it worked on `where`."""
    text = str(error).split("\n\nDebug source", 1)[0].strip()
    code = _XML_CODE.search(text)
    status = _STATUS.search(text)
    if any(mark in text for mark in _FULL):
        return StoreError("the disk is full", where=where, fix="free space there and start again: done shards are kept")
    if _READ_ONLY in text:
        return StoreError("the disk is read-only", where=where, fix="choose a folder that can be written")
    refused = isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
    if isinstance(error, PermissionError) or (refused and "os error" in text):
        return StoreError("permission denied", where=where, fix="make it readable and writable for this user")
    if refused or (code and code[1] == "NoSuchBucket"):
        return refusal(403 if refused else 404, text, where)
    if isinstance(error, FileNotFoundError):
        return ObjectMissingError("there is no such object", where=where)
    if status:
        return refusal(int(status[1]), text, where)
    if "HTTP error" in text:
        return StoreError(
            "the server cannot be reached",
            where=where,
            fix="check the endpoint, the network and that the server runs",
        )
    return StoreError(_first_line(text), where=where)


def refusal(status: int, answer: str, where: str) -> StoreError:
    """The sentence for an answer of a server that did not do what it was asked: HTTP status and (XML) body."""
    code = _XML_CODE.search(answer)
    if code and code[1] == "NoSuchBucket":
        return StoreError("there is no such bucket", where=where, fix="create it, or correct the s3:// URL")
    if status in {401, 403}:
        reason = f" ({code[1]})" if code else ""
        return StoreError(
            f"the server refused the credentials{reason}",
            where=where,
            fix="check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and what the key may do",
        )
    reason = code[1] if code else "no reason given"
    return StoreError(f"the server answered {status} ({reason})", where=where, fix="see the server's log")


def _first_line(text: str) -> str:
    line = text.splitlines()[0] if text else "the store failed without a reason"
    return line.removeprefix("Generic LocalFileSystem error: ").removeprefix("Generic S3 error: ").rstrip(".")
