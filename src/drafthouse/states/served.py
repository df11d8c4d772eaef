"""What servers that capture states have in common: a request a row, errors as sentences, proof of what came back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drafthouse.errors import StatesError
from drafthouse.states.asking import asking
from drafthouse.states.protocols import Described
from drafthouse.states.settings import EngineSettings

_LOADING = (503, 429)
_SENTENCE = 200  # characters of what a server or a library says


class ServedTaps(ABC):
    """A target whose layers a server on this node captures; a `Taps` like any other.

    Args:
        target: what the server serves; its weights are not read.
        settings: where the server is.
        layer_ids: that will be captured, counted from 0; the server has to be started for these.
    """

    def __init__(self, target: Described, settings: EngineSettings, layer_ids: Sequence[int]) -> None:
        self.identity, self.num_layers, self.hidden_size = target.identity, target.num_layers, target.hidden_size
        self.device = torch.device("cpu")
        self._layer_ids, self._settings = tuple(layer_ids), settings
        assert settings.storage is not None
        self._storage = settings.storage
        # A proxy of the environment is for the outside; this server is on this machine.
        self._client = httpx2.Client(base_url=settings.url, timeout=settings.timeout_s, trust_env=False)

    @abstractmethod
    def start_line(self) -> str:
        """What the server has to be started with, to be shown."""

    @abstractmethod
    def _states(self, ids: Tensor, name: str) -> Tensor:
        """`[T, K+1, H]` of one text, by a request of the id `name`."""

    def capture(
        self, input_ids: Tensor, lengths: Tensor, layer_ids: Sequence[int], *, out: Tensor | None = None
    ) -> Tensor:
        """As `Taps.capture`: one request a row, all of them at once; the engine batches them.

        Raises:
            StatesError: the server is not there, was started for other layers, or answered with what is no states.
        """
        if tuple(layer_ids) != self._layer_ids:
            raise StatesError(
                f"layers {list(layer_ids)} are asked for and the server captures {list(self._layer_ids)}",
                where=self._settings.url,
                fix="start it for these layers",
            )
        rows, seq = input_ids.shape
        shape = (rows, seq, len(layer_ids) + 1, self.hidden_size)
        out = torch.zeros(shape, dtype=torch.bfloat16) if out is None else out
        texts = [ids[:length] for ids, length in zip(input_ids, lengths.tolist(), strict=True)]
        with (
            asking(self._storage, 2 * self._settings.timeout_s) as new_name,
            ThreadPoolExecutor(max(1, rows)) as pool,
        ):
            for row, states in enumerate(pool.map(self._states, texts, [new_name() for _ in texts])):
                out[row, : len(states)] = states
        return out

    def _post(self, path: str, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        where = self._settings.url
        try:
            response = self._client.post(path, json=body, headers=headers)
            answer = response.json()
        except httpx2.TimeoutException:
            raise StatesError(
                f"no answer within {self._settings.timeout_s:g} s", where=where, fix="raise extract.engine.timeout_s"
            ) from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise StatesError(f"the server is not there ({reason})", where=where, fix="start it first") from None
        except ValueError:
            answer = {"error": response.text}
        if response.status_code != 200 or not isinstance(answer, dict):
            said = answer.get("error", answer) if isinstance(answer, dict) else answer
            fix = "wait until it is ready" if response.status_code in _LOADING else "see the server's log"
            raise StatesError(
                f"the server answered {response.status_code}: {' '.join(str(said).split())[:_SENTENCE]}",
                where=where,
                fix=fix,
            )
        return answer

    def _load(self, path: Path) -> tuple[Tensor | None, Tensor | None]:
        """States and token ids of a file that the server wrote."""
        try:
            found = load_file(path)
        except (OSError, SafetensorError) as error:
            raise self._unreadable(path, error) from error
        return found.get("hidden_states"), found.get("token_ids")

    @staticmethod
    def _unreadable(path: Path, error: Exception) -> StatesError:
        return StatesError(
            f"what the server wrote cannot be read ({' '.join(str(error).split())[:_SENTENCE]})",
            where=str(path),
            fix="run this on the server's node, as a user who may read its folder",
        )

    def _proven(self, states: Tensor | None, tokens: Tensor | None, ids: Tensor) -> Tensor:
        """`states`, if they are of `ids` and of the layers that are asked for."""
        wanted = (len(ids), len(self._layer_ids) + 1, self.hidden_size)
        if states is None or tokens is None or tuple(states.shape) != wanted:
            shape = None if states is None else list(states.shape)
            raise StatesError(
                f"states of shape {shape} came for a text that needs {list(wanted)}",
                where=self._settings.url,
                fix=f"start the server with {self.start_line()}",
            )
        if not torch.equal(tokens.long(), ids.long()):
            raise StatesError(
                "the states belong to other tokens", where=self._settings.url, fix="see who else uses the server"
            )
        return states
