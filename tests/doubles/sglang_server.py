"""A test double of SGLang, of the standard library alone: it takes SGLang's flags and answers what it was told to.

`package` lays it out as the module `sglang.launch_server`. The file that DOUBLE_ANSWERS names holds, by prompt (ids
joined by blanks), the `output_ids` and verify passes of a server without (`plain`) and with drafts (`drafted`), the
hidden states of three taps and of the last layer (`states`), and answers to chats (`chat`). Its key `fault` makes
servers with drafts end at once (`dies`) or all servers stay unready (`late`). With DRAFTHOUSE_STATES set, states are
written as our plug-in writes them.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def package(folder: Path) -> Path:
    """Write the package under `folder`, which belongs on an interpreter's path; returns `folder`."""
    (folder / "sglang").mkdir(parents=True)
    (folder / "sglang" / "__init__.py").touch()
    (folder / "sglang" / "launch_server.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    return folder


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    told: dict[str, Any]
    model: str
    role: str
    taps = 3
    storage: Path | None = None
    drafts = 0
    """Requests with drafts so far; each counts as 11 tokens of 5 passes."""

    def log_message(self, *_: object) -> None:
        return None

    def do_GET(self) -> None:
        if self.path == "/metrics":
            count = Handler.drafts
            page = f"sglang:generation_tokens_total {11 * count}\nsglang:spec_verify_calls_total {5 * count}\n"
            return self._answer(200, f"{page}sglang:e2e_request_latency_seconds_count {count}\n".encode())
        ready = 503 if self.told.get("fault") == "late" else 200
        return self._answer(ready, json.dumps({"data": [{"id": self.model}]}).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Handler.drafts += self.role == "drafted"
        if self.path == "/generate":
            given = asked["input_ids"]
            if isinstance(given[0], int):
                found: Any = self._generated(" ".join(map(str, given)), asked)
            else:
                found = [self._generated(" ".join(map(str, ids)), asked) for ids in given]
        else:
            content = self.told["chat"].get(asked["messages"][-1]["content"], "I do not know that.")
            found = {"choices": [{"message": {"role": "assistant", "content": content}}]}
        return self._answer(200, json.dumps(found).encode())

    def _generated(self, prompt: str, asked: dict[str, Any]) -> dict[str, Any]:
        found = self.told[self.role][prompt]
        meta: dict[str, Any] = {"completion_tokens": len(found["output_ids"])}
        if self.role == "drafted":
            meta["spec_verify_ct"] = found["passes"]
        states = self.told["states"][prompt]
        if asked.get("return_hidden_states"):  # of the taps; the last state is not among them
            width = len(states[0]) // (self.taps + 1)
            meta["hidden_states"] = [[token[: self.taps * width] for token in states]]
        if "rid" in asked and self.storage is not None:
            write_states(self.storage / f"{asked['rid']}.0.safetensors", prompt, states, self.taps + 1)
        return {"output_ids": found["output_ids"], "meta_info": meta}

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def write_states(path: Path, prompt: str, states: list[list[float]], layers: int) -> None:
    """As the plug-in writes them, by hand: safetensors is a header in JSON, its length before it, and the bytes."""
    ids = [int(word) for word in prompt.split()]
    numbers = struct.pack(f"<{len(states) * len(states[0])}f", *(number for token in states for number in token))
    tokens = struct.pack(f"<{len(ids)}q", *ids)
    shape = [len(ids), layers, len(states[0]) // layers]
    header = json.dumps(
        {
            "hidden_states": {"dtype": "F32", "shape": shape, "data_offsets": [0, len(numbers)]},
            "token_ids": {
                "dtype": "I64",
                "shape": [len(ids)],
                "data_offsets": [len(numbers), len(numbers) + len(tokens)],
            },
        }
    ).encode()
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".part").write_bytes(struct.pack("<Q", len(header)) + header + numbers + tokens)
    path.with_suffix(".part").rename(path)


def main() -> None:
    """Serve until the process ends."""
    words = argparse.ArgumentParser()
    words.add_argument("--served-model-name", required=True)
    words.add_argument("--port", type=int, required=True)
    words.add_argument("--speculative-draft-model-path")
    given, _ = words.parse_known_args()
    Handler.told = json.loads(Path(os.environ["DOUBLE_ANSWERS"]).read_text(encoding="utf-8"))
    Handler.model = given.served_model_name
    if os.environ.get("DRAFTHOUSE_STATES"):
        Handler.storage = Path(os.environ["DRAFTHOUSE_STATES"])
    Handler.role = "drafted" if given.speculative_draft_model_path else "plain"
    if Handler.told.get("fault") == "dies" and Handler.role == "drafted":
        sys.exit("RuntimeError: no kernel for this shape")
    ThreadingHTTPServer(("127.0.0.1", given.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
