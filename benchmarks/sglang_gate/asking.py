"""Requests to SGLang's native endpoint: token ids in, token ids and the count of verify passes out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
import numpy as np


class NoAnswerError(Exception):
    """The server refused, was too slow, or said something else."""


@dataclass(frozen=True)
class Answer:
    """One greedy text.

    Attributes:
        tokens: generated ids, an end-of-turn token included.
        passes: verify passes after prefill; None without drafts.
    """

    tokens: list[int]
    passes: int | None


class Client:
    """Asks one server; no proxy of the environment stands between."""

    def __init__(self, url: str, ends: Sequence[int], new_tokens: int, timeout_s: float = 90.0) -> None:
        self._client = httpx2.Client(timeout=timeout_s, trust_env=False)
        self._url, self._ends, self._new_tokens = url, list(ends), new_tokens

    def texts(self, prompts: Sequence[np.ndarray]) -> tuple[list[Answer], float]:
        """Greedy texts of prompts (ids `[length]`) that are asked at once, and the seconds until all were there."""
        began = time.perf_counter()
        found = self._generate(prompts, self._new_tokens)
        seconds = time.perf_counter() - began
        try:
            answers = [
                Answer([int(token) for token in one["output_ids"]], one["meta_info"].get("spec_verify_ct"))
                for one in found
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise NoAnswerError(f"an answer lacks {error}") from None
        return answers, seconds

    def states(self, prompt: np.ndarray, width: int) -> np.ndarray:
        """Hidden states of a prompt `[length, width]` float32, as the capture plug-in hands them out."""
        [found] = self._generate([prompt], 1, return_hidden_states=True)
        try:
            states = np.array(found["meta_info"]["hidden_states"][0], dtype=np.float32)
        except (KeyError, IndexError, TypeError, ValueError):
            raise NoAnswerError("the answer holds no hidden states of the prompt") from None
        if states.shape != (len(prompt), width):
            raise NoAnswerError(f"hidden states are {list(states.shape)}, expected {[len(prompt), width]}")
        return states

    def _generate(self, prompts: Sequence[np.ndarray], new_tokens: int, **more: Any) -> list[dict[str, Any]]:
        sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "stop_token_ids": self._ends}
        body = {"input_ids": [prompt.tolist() for prompt in prompts], "sampling_params": sampling, **more}
        try:
            response = self._client.post(f"{self._url}/generate", json=body)
        except httpx2.HTTPError as error:
            raise NoAnswerError(f"/generate: {error or type(error).__name__}") from None
        if response.status_code != 200:
            raise NoAnswerError(f"/generate answered {response.status_code}: {response.text[:200]}")
        try:
            found = response.json()
        except ValueError:
            raise NoAnswerError("/generate answered something that is not JSON") from None
        if not isinstance(found, list) or len(found) != len(prompts):
            raise NoAnswerError(f"/generate did not answer {len(prompts)} prompts")
        return found
