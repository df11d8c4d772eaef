"""A test double of a vLLM server with `ExampleHiddenStatesConnector`, over a real target.

It writes as vLLM 0.32 does: one safetensors file a request, named by its id, under a lock that is taken before the path
is told and let go when the file is whole. `Behaviour` makes it go wrong in the ways that were seen.
"""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from drafthouse.target import Target
from tests.doubles.loopback import JsonHandler, serving


@dataclass
class Behaviour:
    """What it computes, and what goes wrong with it.

    Attributes:
        layer_ids: counted from 1, as its command line has them.
        write_s: seconds between the answer and the whole file.
        held: no file is written before it is set.
        broken: "no-path" (no connector is configured), "elsewhere" (another folder), "zeros" (vllm#46301), "loading",
            "tokens" (of another request), "torn" (no safetensors).
    """

    target: Target
    storage: Path
    layer_ids: Sequence[int]
    write_s: float = 0.0
    held: threading.Event | None = None
    broken: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)
    requests: int = 0


class Handler(JsonHandler):
    def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
        behaviour: Behaviour = self.server.double  # type: ignore[attr-defined]
        asked = self.asked()
        assert self.path == "/v1/completions"
        assert asked["max_tokens"] == 1
        if behaviour.broken == "loading":
            self.answer(503, {"error": "the engine is loading"})
            return
        if behaviour.broken == "no-path":
            self.answer(200, {"choices": [{"text": "x"}]})
            return
        with behaviour.lock:
            behaviour.requests += 1
            name = f"cmpl-{self.headers.get('X-Request-Id', behaviour.requests)}-0-1a2b3c4d.safetensors"
            tensors = self._tensors(behaviour, asked["prompt"])
        folder = behaviour.storage if behaviour.broken != "elsewhere" else behaviour.storage.parent / "other"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / name
        held = path.with_name(f"{name}.lock").open("w")
        fcntl.flock(held, fcntl.LOCK_EX)

        def write() -> None:
            time.sleep(behaviour.write_s)
            if behaviour.held is not None:
                behaviour.held.wait()
            if behaviour.broken == "torn":
                path.write_bytes(b"not a file of tensors")
            else:
                save_file(tensors, path)
            held.close()

        threading.Thread(target=write, daemon=True).start()
        self.answer(200, {"choices": [{"text": "x"}], "kv_transfer_params": {"hidden_states_path": str(path)}})

    def _tensors(self, behaviour: Behaviour, ids: list[int]) -> dict[str, torch.Tensor]:
        target, tokens = behaviour.target, torch.tensor([ids])
        wanted = [layer - 1 for layer in behaviour.layer_ids if layer < target.num_layers]
        states = target.capture(tokens, torch.tensor([len(ids)]), wanted)[0].bfloat16()
        if behaviour.broken == "zeros":
            states = torch.zeros_like(states)
        told = tokens[0].flip(0) if behaviour.broken == "tokens" else tokens[0]
        return {"hidden_states": states.contiguous(), "token_ids": told.contiguous()}


@contextmanager
def vllm_server(behaviour: Behaviour) -> Iterator[str]:
    """Serve until the block ends; yields the address."""
    with serving(Handler, behaviour) as url:
        yield url
