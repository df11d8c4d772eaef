"""A test double of vLLM's server: ``python -m tests.doubles.embedded_server [--broken] --port P …``.

It speaks the OpenAI protocol and generates for real, with the small target of the package decoded greedily; what a real
engine adds (batching, drafts, graphs) is missing. With ``--broken`` it is the served model that loads and
says nonsense.
"""

from __future__ import annotations

import argparse
import json
import signal
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from drafthouse.decode import DecodeSettings, Stepper, decode
from drafthouse.loop.tiny import embedded_target
from drafthouse.target import Target

MODEL = "embedded"


class Engine:
    """The target behind a lock: one request after another."""

    def __init__(self, broken: bool) -> None:
        torch.set_num_threads(1)
        self._target = Target.load(embedded_target())
        self._stepper, self._broken, self._lock = Stepper(self._target), broken, threading.Lock()

    def answer(self, messages: list[dict[str, str]], max_tokens: int) -> str:
        if self._broken:
            return "lambda " * max_tokens
        tokenizer = self._target.tokenizer
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        settings = DecodeSettings(mode="autoregressive", max_new_tokens=max_tokens, rows=1)
        with self._lock:
            [generation] = decode(self._stepper, None, [torch.tensor(ids).numpy()], settings)
        return str(tokenizer.decode(generation.tokens, skip_special_tokens=True))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine

    def log_message(self, *_: object) -> None:
        return None

    def do_GET(self) -> None:
        if self.path in {"/health", "/v1/models"}:
            self._answer(200, {"data": [{"id": MODEL}]})
        else:
            self._answer(404, {"error": "not found"})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = self.engine.answer(asked["messages"], int(asked.get("max_tokens", 16)))
        self._answer(200, {"choices": [{"message": {"role": "assistant", "content": text}}]})

    def _answer(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        with suppress(BrokenPipeError, ConnectionResetError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--broken", action="store_true")
    wanted, _ = parser.parse_known_args()  # the profile's flags are for a real engine
    Handler.engine = Engine(wanted.broken)
    server = ThreadingHTTPServer((wanted.host, wanted.port), Handler)
    # Requests that are being answered are finished: shutdown() waits for nothing but the accepting loop.
    server.daemon_threads = False
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    print(f"serving {MODEL} on {wanted.host}:{wanted.port}", flush=True)
    server.serve_forever(poll_interval=0.05)
    server.server_close()


if __name__ == "__main__":
    main()
