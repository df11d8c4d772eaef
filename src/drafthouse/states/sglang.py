"""Capture by an SGLang server that runs our plug-in (`plugins/sglang_states.py`), on one node.

The plug-in writes a safetensors file a chunk of a prompt into a folder that this process reads; a request's id is ours
and names its files, and a file has its name when it is whole. Layer ids count from 0, as everywhere here.
"""

from __future__ import annotations

import shlex
import time

import torch
from torch import Tensor

from drafthouse.errors import StatesError
from drafthouse.plugins.sglang_states import FOLDER, LAYERS
from drafthouse.states.served import ServedTaps

# The answer comes when the first token has been drawn; the file is on its way to the disk by then.
_PATIENCE_S, _LOOK_S = 30.0, 0.002


class SglangTaps(ServedTaps):
    """A target whose layers an SGLang server captures."""

    def environment(self) -> dict[str, str]:
        """Variables that the server has to be started with; drafthouse has to be installed beside it."""
        return {FOLDER: str(self._storage), LAYERS: ",".join(map(str, self._layer_ids))}

    def arguments(self) -> list[str]:
        """What `python -m sglang.launch_server` has to be started with."""
        # A prefix from the cache is not computed, and a graph of the prefill runs past the plug-in.
        return ["--disable-radix-cache", "--cuda-graph-backend-prefill=disabled"]

    def start_line(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment().items()]
        return " ".join([*variables, "python -m sglang.launch_server --model-path MODEL", *self.arguments()])

    def _states(self, ids: Tensor, name: str) -> Tensor:
        body = {
            "input_ids": ids.tolist(),
            "rid": name,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        }
        states: list[Tensor] = []
        tokens: list[Tensor] = []
        try:
            self._post("/generate", body)
            while (first := sum(map(len, states))) < len(ids):
                some, of = self._chunk(name, first)
                if some is None or of is None or not len(some):
                    return self._proven(None, None, ids)
                states.append(some)
                tokens.append(of)
        finally:
            for path in self._storage.glob(f"{name}.*"):
                path.unlink(missing_ok=True)
        return self._proven(torch.cat(states), torch.cat(tokens), ids)

    def _chunk(self, name: str, first: int) -> tuple[Tensor | None, Tensor | None]:
        """A chunk of the text, from its token `first`."""
        path = self._storage / f"{name}.{first}.safetensors"
        end = time.monotonic() + min(_PATIENCE_S, self._settings.timeout_s)
        while not path.exists():
            if time.monotonic() > end:
                raise StatesError(
                    f"the server answered and wrote no states to {self._storage}",
                    where=self._settings.url,
                    fix=f"start it with {self.start_line()}, and see its log",
                )
            time.sleep(_LOOK_S)
        return self._load(path)
