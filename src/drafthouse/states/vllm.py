"""Capture by a vLLM server: its `extract_hidden_states` method and `ExampleHiddenStatesConnector`, on one node.

The server computes and writes one safetensors file a request into a folder that this process reads; its path comes with
the answer, and a lock beside it says when it is whole (vLLM 0.32, docs "Hidden State Extraction"). The id that a
request brings along (X-Request-Id) is part of that path. Its layer ids count from 1: id L is what layer L-1 puts out,
and the number of layers names the last output before the final norm. Hybrid models gave zeros or strange blocks in
several releases (vllm#46301), which is why every state is checked here too.
"""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from drafthouse.errors import StatesError
from drafthouse.states.served import ServedTaps


class VllmTaps(ServedTaps):
    """A target whose layers a vLLM server captures."""

    def arguments(self) -> list[str]:
        """What `vllm serve MODEL` has to be started with."""
        speculative = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": self._wanted()}},
        }
        transfer = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(self._storage)},
        }
        # A prefix that is taken from the cache is not computed, and has no states.
        return [
            "--no-enable-prefix-caching",
            f"--speculative-config={json.dumps(speculative)}",
            f"--kv-transfer-config={json.dumps(transfer)}",
        ]

    def start_line(self) -> str:
        return " ".join(self.arguments())

    def _wanted(self) -> list[int]:
        return [layer + 1 for layer in self._layer_ids] + [self.num_layers]

    def _states(self, ids: Tensor, name: str) -> Tensor:
        body = {"prompt": ids.tolist(), "max_tokens": 1, "temperature": 0.0}
        answer = self._post("/v1/completions", body, {"X-Request-Id": name})
        path = self._inside((answer.get("kv_transfer_params") or {}).get("hidden_states_path"))
        lock = path.with_name(path.name + ".lock")
        try:
            with lock.open("rb") as held:
                fcntl.flock(held, fcntl.LOCK_SH)  # until the writer is through
                states, tokens = self._load(path)
        except OSError as error:
            raise self._unreadable(path, error) from error
        finally:
            for file in (path, lock):
                file.unlink(missing_ok=True)
        return self._proven(states, tokens, ids)

    def _inside(self, told: Any) -> Path:
        """The file that an answer names; it lies in the folder that was agreed upon, whoever answers."""
        if not isinstance(told, str) or not told:
            raise StatesError(
                "the server extracts no hidden states",
                where=self._settings.url,
                fix=f"start it with {self.start_line()}",
            )
        path = Path(told)
        if not path.resolve().is_relative_to(self._storage.resolve()):
            raise StatesError(
                f"the server writes to {path.parent}, and not to {self._storage}",
                where="extract.engine.storage",
                fix="give the server's shared_storage_path",
            )
        return path
