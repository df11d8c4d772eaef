"""Signatures against the examples that AWS publishes with the algorithm."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from drafthouse.store.sigv4 import Credentials, sign

# https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html, "Examples: Signature Calculations"
EXAMPLE = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
HOST, WHEN = "examplebucket.s3.amazonaws.com", datetime(2013, 5, 24, tzinfo=UTC)


@pytest.mark.parametrize(
    ("query", "target", "signature"),
    [
        ({"lifecycle": ""}, "/?lifecycle=", "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        (
            {"prefix": "J", "max-keys": "2"},
            "/?max-keys=2&prefix=J",
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        ),
    ],
)
def test_the_published_examples(query: dict[str, str], target: str, signature: str) -> None:
    sent, headers = sign("GET", HOST, "/", query, EXAMPLE, "us-east-1", WHEN)
    assert sent == target
    assert headers["authorization"] == (
        "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,"
        f" SignedHeaders=host;x-amz-content-sha256;x-amz-date, Signature={signature}"
    )
    assert headers["x-amz-date"] == "20130524T000000Z"


def test_a_time_of_another_zone_is_the_same_time() -> None:
    elsewhere = WHEN.astimezone(timezone(timedelta(hours=9)))
    arguments = ("GET", HOST, "/", {}, EXAMPLE, "us-east-1")
    assert sign(*arguments, elsewhere) == sign(*arguments, WHEN)


def test_names_are_escaped_as_they_are_signed() -> None:
    sent, _ = sign("GET", HOST, "/b/a=1+2@,:~-", {"uploadId": "a/b+c="}, EXAMPLE, "us-east-1", WHEN)
    assert sent == "/b/a%3D1%2B2%40%2C%3A~-?uploadId=a%2Fb%2Bc%3D"


def test_a_session_token_is_sent_and_signed() -> None:
    temporary = Credentials(EXAMPLE.access_key, EXAMPLE.secret_key, "token")
    _, headers = sign("GET", HOST, "/", {}, temporary, "us-east-1", WHEN)
    assert headers["x-amz-security-token"] == "token"
    assert "x-amz-date;x-amz-security-token," in headers["authorization"]


def test_secrets_are_not_shown() -> None:
    assert "wJalr" not in repr(EXAMPLE)
    assert "token" not in repr(Credentials("key", "secret", "token"))
