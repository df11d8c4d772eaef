"""A test double of an OpenAI-compatible server that fails at random, in the ways that such servers do."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.doubles.loopback import serving

MODEL = "flaky"
WAYS = ("status 500", "status 503", "status 429", "hang up", "cut off", "page", "no choices")


@dataclass
class Flaky:
    """The running double. `failing` is the share of requests that fail; `ways` are drawn from evenly.

    A question that holds "too long" is refused (400), "mute" gets an empty answer, "cut" one that ends at the limit,
    "call" a tool call, "cursed" never an answer.
    """

    url: str = ""
    failing: float = 0.0
    ways: tuple[str, ...] = WAYS
    seed: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    most_at_once: int = 0
    dead_after: int | None = None
    """Answers after which every request fails."""

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.draw = random.Random(self.seed)
        self.at_once = 0

    def way_to_fail(self, question: str) -> str | None:
        with self.lock:
            dead = self.dead_after is not None and self.answered.total() >= self.dead_after
            if dead or "cursed" in question or self.draw.random() < self.failing:
                way = self.draw.choice(self.ways)
                self.failures[way] += 1
                return way
            return None


@contextmanager
def flaky_openai_double(flaky: Flaky | None = None) -> Iterator[Flaky]:
    """Serve on a free loopback port until the block ends."""
    double = flaky or Flaky()
    with serving(_Handler, double) as double.url:
        yield double


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def double(self) -> Flaky:
        return self.server.double  # type: ignore[attr-defined, no-any-return]

    def log_message(self, *_: object) -> None:
        return None

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": MODEL}]}).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        flaky = self.double
        question = str(asked["messages"][-1]["content"])
        with flaky.lock:
            flaky.requests.append(asked)
            flaky.at_once += 1
            flaky.most_at_once = max(flaky.most_at_once, flaky.at_once)
        try:
            self._respond(asked, question)
        finally:
            with flaky.lock:
                flaky.at_once -= 1

    def _respond(self, asked: dict[str, Any], question: str) -> None:
        way = self.double.way_to_fail(question)
        if way is None:
            if "too long" in question:
                return self._send(400, b'{"error": {"message": "the context is too long"}}')
            with self.double.lock:
                self.double.answered[question] += 1
            return self._send(200, json.dumps(_completion(question)).encode())
        if way.startswith("status"):
            return self._send(int(way.split()[1]), b'{"error": "busy"}')
        if way == "page":
            return self._send(200, b"<html>Bad gateway</html>")
        if way == "no choices":
            return self._send(200, b'{"choices": []}')
        self.close_connection = True
        if way == "cut off":
            body = json.dumps(_completion(question)).encode()
            with suppress(OSError):
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: len(body) // 2])
        return None

    def _send(self, status: int, body: bytes) -> None:
        with suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)


def answer_of(question: str) -> str:
    return f"Answer to: {question}"


def _completion(question: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer_of(question), "reasoning_content": "Let me see."}
    finish = "stop"
    if "mute" in question:
        message["content"] = ""
    if "cut" in question:
        finish = "length"
    if "call" in question:
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
        message |= {"content": None, "tool_calls": [call]}
        finish = "tool_calls"
    return {
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"completion_tokens": len(question)},
    }
