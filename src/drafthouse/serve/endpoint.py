"""Requests to an OpenAI-compatible server, and every way in which its answer can be none."""

from __future__ import annotations

from typing import Any

import httpx2

from drafthouse.serve import metrics
from drafthouse.serve.errors import CanaryError
from drafthouse.serve.profile import CanarySpec

EXCERPT = 120


class ServerError(Exception):
    """An answer that is none: refused, too late, or not what the protocol says."""


class Endpoint:
    """One server, as the canary sees it.

    Args:
        base_url: with or without `/v1`.
        spec: its time limit, and what every request carries along.
    """

    def __init__(self, base_url: str, spec: CanarySpec) -> None:
        self.root = base_url.rstrip("/").removesuffix("/v1")
        limit = httpx2.Timeout(spec.timeout_s, connect=min(10.0, spec.timeout_s))
        # A proxy of the environment is for the outside; the node that was just deployed is not there.
        self._client = httpx2.Client(timeout=limit, trust_env=False)
        self._spec = spec
        self.model: str | None = None

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def models(self) -> list[str]:
        """Names that the server lists."""
        body = self._json("GET", "/v1/models")
        try:
            return [entry["id"] for entry in body["data"]]
        except (KeyError, TypeError):
            raise ServerError("/v1/models does not list models") from None

    def metrics(self) -> dict[str, float]:
        """Samples of its Prometheus page."""
        return metrics.parse(self._request("GET", "/metrics").text)

    def ask(self, messages: list[dict[str, str]], max_tokens: int, **more: Any) -> tuple[str, str]:
        """(answer, answer with the reasoning before it) at temperature 0."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            **more,
        }
        if self._spec.chat_template_kwargs:
            body["chat_template_kwargs"] = self._spec.chat_template_kwargs
        answer = self._json("POST", "/v1/chat/completions", body)
        try:
            message = answer["choices"][0]["message"]
            content = message.get("content") or ""
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ServerError("the answer holds no message") from None
        return content, f"{reasoning}\n{content}".strip()

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            return self._request(method, path, body).json()
        except ValueError:
            raise ServerError(f"{path} answered something that is not JSON") from None

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx2.Response:
        try:
            response = self._client.request(method, self.root + path, json=body)
        except httpx2.TimeoutException:
            raise ServerError(f"no answer from {path} within {self._spec.timeout_s:g} s") from None
        except httpx2.HTTPError as error:
            raise ServerError(f"{path}: {error or type(error).__name__}") from None
        except httpx2.InvalidURL as error:
            raise CanaryError(
                f"not the address of a server ({error})", where=self.root, fix="write it as http://HOST:PORT"
            ) from None
        if response.status_code != 200:
            raise ServerError(f"{path} answered {response.status_code}: {short(response.text)}")
        return response


def short(text: str) -> str:
    """One line, cut where a report would become unreadable."""
    flat = " ".join(text.split())
    return flat if len(flat) <= EXCERPT else f"{flat[: EXCERPT - 1]}…"
