"""A test double of an OpenAI-compatible server: it answers well, or as badly as served models have answered.

As a program it takes an engine's `--host`, `--port` and `--served-model-name`, and further `Behaviour` as JSON from
the variable DOUBLE_BEHAVIOUR; other flags are an engine's business and are passed over.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

TOKENS_A_REQUEST = 40


@dataclass
class Behaviour:
    """How it answers; changed while it runs."""

    model: str = "double"
    answers: dict[str, str] = field(default_factory=dict)
    """Answer to prompts that hold the key."""
    text: str | None = None
    """Every chat answer, instead of the right one."""
    status: int = 200
    """Of chat answers."""
    body: bytes | None = None
    """Raw body of chat answers."""
    delay_s: float = 0
    """Before chat answers."""
    held: threading.Event | None = None
    """No chat is answered before it is set."""
    drop: bool = False
    """Close the connection instead of answering a chat."""
    forgets: bool = False
    """A resumed prefix is answered from somewhere else."""
    ignores_schema: bool = False
    engine: Literal["vllm", "sglang", "sglang-gauge", "none"] = "vllm"
    """Whose metrics are shown; none: 404."""
    acceptance: float = 2.5
    """Tokens per verify pass that the metrics will tell; 0: nothing is drafted."""


@dataclass
class OpenAiDouble:
    """The running double; `requests` are the bodies of all chats."""

    url: str
    behaviour: Behaviour
    requests: list[dict[str, Any]] = field(default_factory=list)


def _listening(host: str, port: int, behaviour: Behaviour) -> tuple[ThreadingHTTPServer, OpenAiDouble]:
    server = ThreadingHTTPServer((host, port), _Handler)
    server.daemon_threads = True
    double = OpenAiDouble(f"http://{host}:{server.server_port}", behaviour)
    server.double = double  # type: ignore[attr-defined]
    return server, double


@contextmanager
def openai_double(behaviour: Behaviour | None = None) -> Iterator[OpenAiDouble]:
    """Serve on a free loopback port until the block ends."""
    server, double = _listening("127.0.0.1", 0, behaviour or Behaviour())
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield double
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def double(self) -> OpenAiDouble:
        return self.server.double  # type: ignore[attr-defined, no-any-return]

    def log_message(self, *_: object) -> None:
        return None

    def do_GET(self) -> None:
        how = self.double.behaviour
        if self.path == "/v1/models":
            return self._answer(200, json.dumps({"data": [{"id": how.model}]}).encode())
        if self.path == "/health":
            return self._answer(200, b"")
        if self.path == "/metrics" and how.engine != "none":
            return self._answer(200, _metrics(how, len(self.double.requests)).encode())
        return self._answer(404, b"not found")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        how = self.double.behaviour
        self.double.requests.append(asked)
        time.sleep(how.delay_s)
        if how.held is not None:
            how.held.wait()
        if how.drop:
            self.close_connection = True
            return None
        if how.status != 200 or how.body is not None:
            return self._answer(how.status, how.body if how.body is not None else b'{"error": "out of order"}')
        message = {"role": "assistant", "content": _reply(how, asked)}
        return self._answer(200, json.dumps({"choices": [{"message": message}]}).encode())

    def _answer(self, status: int, body: bytes) -> None:
        # A client whose patience has ended is part of the play.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)


def _reply(how: Behaviour, asked: dict[str, Any]) -> str:
    if how.text is not None:
        return how.text
    messages = asked["messages"]
    if "response_format" in asked:
        return "The parcel is red." if how.ignores_schema else '{"colour": "red", "count": 12}'
    if len(messages) > 1 and how.forgets:
        return "I am not sure which code you mean."
    code = re.search(r"The code of the archive is (\S+)\.\n", messages[0]["content"])
    if code is not None:
        return code[1]
    prompt = messages[-1]["content"]
    return next((answer for key, answer in how.answers.items() if key in prompt), "I do not know that.")


def _metrics(how: Behaviour, requests: int) -> str:
    """Counters as if every chat had made 40 tokens, the first of them in prefill."""
    rounds = (TOKENS_A_REQUEST - 1) / how.acceptance * requests if how.acceptance else 0.0
    accepted = rounds * (how.acceptance - 1)
    if how.engine == "vllm":
        return (
            "# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.\n"
            f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="{how.model}"}} {rounds}\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="{how.model}"}} {accepted}\n'
        )
    if how.engine == "sglang":
        return (
            f'sglang:generation_tokens_total{{is_streaming="false"}} {TOKENS_A_REQUEST * requests}\n'
            f"sglang:spec_verify_calls_total {rounds}\n"
            f"sglang:e2e_request_latency_seconds_count {requests}\n"
            "sglang:spec_accept_length 9.0\n"
        )
    return f"sglang:spec_accept_length {how.acceptance}\n"


def main() -> None:
    """Serve until the process ends."""
    words = argparse.ArgumentParser()
    words.add_argument("--host", default="127.0.0.1")
    words.add_argument("--port", type=int, required=True)
    words.add_argument("--served-model-name", required=True)
    given, _ = words.parse_known_args()
    behaviour = Behaviour(given.served_model_name, **json.loads(os.environ.get("DOUBLE_BEHAVIOUR", "{}")))
    _listening(given.host, given.port, behaviour)[0].serve_forever()


if __name__ == "__main__":
    main()
