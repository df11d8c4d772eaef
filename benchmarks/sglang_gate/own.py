"""Our own decoder beside the server: the same prompts, the same drafter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drafthouse.decode import DecodeSettings, Generation, Stepper, decode
from drafthouse.drafter import DFlashDrafter, load_drafter
from drafthouse.target import Target

BEGINNING = 24  # tokens of an answer; the longer, the likelier is a near-tie


class Own:
    """The target and its drafter as our own decoder runs them."""

    def __init__(self, target: Path, drafter: Path, device: str, dtype: torch.dtype) -> None:
        self.target = Target.load(target, device=device, dtype=dtype)
        self.drafter: DFlashDrafter = load_drafter(drafter, target_identity=self.target.identity, device=device)
        self.drafter = self.drafter.to(dtype)
        self.stepper = Stepper(self.target, self.drafter.config.target_layer_ids)

    def decode(self, mode: str, prompts: Sequence[np.ndarray], new_tokens: int) -> list[Generation]:
        chosen = DecodeSettings.model_validate({"mode": mode, "max_new_tokens": new_tokens, "rows": 64})
        return decode(self.stepper, None if mode == "autoregressive" else self.drafter, prompts, chosen)


def chosen_prompts(held: list[dict[str, Any]], own: Own, count: int, new_tokens: int) -> list[dict[str, Any]]:
    """`count` held-out prompts, kind after kind, those with the longest answers of our own first."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for one in held:
        if len(kinds.setdefault(one["kind"], [])) < 16:
            kinds[one["kind"]].append(one)
    some = [one for group in kinds.values() for one in group]
    answers = own.decode("autoregressive", [np.array(one["ids"], dtype=np.int32) for one in some], new_tokens)
    for one, answer in zip(some, answers, strict=True):
        one["own"] = answer.tokens
    for group in kinds.values():
        group.sort(key=lambda one: -len(one["own"]))
    turns = [group[place] for place in range(16) for group in kinds.values() if place < len(group)]
    return turns[:count]


def questions(chosen: Sequence[dict[str, Any]], tokenizer: Any, most: int) -> list[dict[str, Any]]:
    """Prompts of a single user turn as the canary asks them; right is what begins as our own answer does."""
    found = []
    for one in chosen:
        text = tokenizer.decode(one["ids"], skip_special_tokens=False)
        said = text.partition("user\n")[2].partition("<|im_end|>")[0]
        again = tokenizer.apply_chat_template(
            [{"role": "user", "content": said}], add_generation_prompt=True, return_dict=False
        )
        answer = tokenizer.decode(one["own"][:BEGINNING], skip_special_tokens=True).strip()
        if said and answer and list(again) == list(one["ids"]):
            found.append({"prompt": said, "answers": [answer], "max_tokens": len(one["own"]) + 1})
    return found[:most]
