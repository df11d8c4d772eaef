"""What our own decoder says that a served drafter will have accepted, on questions of the corpus that it never saw."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from drafthouse.corpus import ChatTemplate, Prompt, grammar
from drafthouse.decode import DecodeSettings, Generation, Stepper, decode
from drafthouse.drafter import load_drafter
from drafthouse.loop.tiny import embedded_target
from drafthouse.target import Target

# Of the demo's corpus another seed, and of that the held-out side: no text of the training.
SEED = 4_711


@dataclass(frozen=True)
class Foretold:
    """Questions, and what a greedy server does with them that drafts as our decoder does.

    Attributes:
        texts: what a user says, one turn each.
        input_tokens: mean of the prompts, rendered by the chat template.
        acceptance: tokens per target pass, prefill left out; of a last pass all tokens, also those behind the cut.
        rounds: target passes that this is the mean of.
    """

    texts: tuple[str, ...]
    input_tokens: float
    acceptance: float
    rounds: int


def _questions(target: Target) -> Iterator[tuple[str, np.ndarray]]:
    template = ChatTemplate(target.tokenizer)
    for conversation in grammar.conversations("repeat", SEED, "heldout"):
        if [message.role for message in conversation.messages] != ["user", "assistant"]:
            continue
        prompt = template.prompt(conversation)
        if isinstance(prompt, Prompt):
            yield conversation.messages[0].content, prompt.input_ids


def _passes(generation: Generation, tokens: int) -> list[int]:
    """Tokens of each pass until `tokens` are there; the first of them comes from prefill."""
    taken: list[int] = []
    while 1 + sum(taken) < tokens:
        taken.append(generation.rounds[len(taken)])
    return taken


def foretell(drafter_folder: Path, count: int, output_tokens: int) -> Foretold:
    """`count` questions whose answers do not end within `output_tokens`, where a server that ignores ends and one that
    does not are the same."""
    target = Target.load(embedded_target())
    drafter = load_drafter(drafter_folder)
    asked = list(islice(_questions(target), 6 * count))
    settings = DecodeSettings(max_new_tokens=output_tokens + drafter.config.block_size)
    stepper = Stepper(target, drafter.config.target_layer_ids)
    decoded = decode(stepper, drafter, [ids for _, ids in asked], settings)
    ends = set(target.eos_ids)
    long = [pair for pair in zip(asked, decoded, strict=True) if not ends & set(pair[1].tokens)][:count]
    assert len(long) == count
    passes = [size for _, generation in long for size in _passes(generation, output_tokens)]
    return Foretold(
        texts=tuple(text for (text, _), _ in long),
        input_tokens=float(np.mean([len(ids) for (_, ids), _ in long])),
        acceptance=sum(passes) / len(passes),
        rounds=len(passes),
    )
