"""AWS Signature Version 4 for requests without a body, as headers.

obstore signs what it sends and has no call for the few requests that it lacks (listing and aborting multipart
uploads); its presigned URLs cannot carry their query. boto3 could do it for 36 MiB more.
Source: https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import quote

_NOTHING = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True)
class Credentials:
    """An access key; `session_token` belongs to temporary ones."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


def sign(
    method: str,
    host: str,
    path: str,
    query: Mapping[str, str],
    credentials: Credentials,
    region: str,
    now: datetime,
) -> tuple[str, dict[str, str]]:
    """Path and query as they must be sent, and the headers that sign them.

    Args:
        method: GET, DELETE, …
        host: as the Host header will say it, with the port unless it is the scheme's own.
        path: from the root, not yet escaped.
        query: parameters, not yet escaped; one without a value has the empty one.
        now: aware; servers accept a quarter of an hour of difference.
    """
    stamp = now.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    target = quote(path, safe="/-_.~")
    parameters = "&".join(f"{_escaped(name)}={_escaped(value)}" for name, value in sorted(query.items()))
    headers = {"host": host, "x-amz-content-sha256": _NOTHING, "x-amz-date": stamp}
    if credentials.session_token:
        headers["x-amz-security-token"] = credentials.session_token
    names = ";".join(sorted(headers))
    lines = [f"{name}:{headers[name]}" for name in sorted(headers)]
    request = "\n".join([method, target, parameters, *lines, "", names, _NOTHING])
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(request.encode()).hexdigest()])
    key = f"AWS4{credentials.secret_key}".encode()
    for word in (*scope.split("/"), text):
        key = hmac.digest(key, word.encode(), "sha256")
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, SignedHeaders={names}, Signature={key.hex()}"
    )
    return f"{target}?{parameters}" if parameters else target, headers


def _escaped(text: str) -> str:
    return quote(text, safe="-_.~")
