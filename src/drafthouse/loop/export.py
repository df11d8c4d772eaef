"""`drafthouse export`: a trained drafter as one checkpoint for engines, written only when the gate lets it through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from drafthouse.config import differences
from drafthouse.corpus import prompts
from drafthouse.decode import DecodeSettings, Stepper, decode
from drafthouse.drafter import DFlashDrafter, save_drafter
from drafthouse.drafter.export import check_replaceable, read_config
from drafthouse.drafter.trainer import DRAFTER
from drafthouse.errors import DrafterError
from drafthouse.loop.folder import RunFolder
from drafthouse.loop.gate import ByHeart, Parity, by_heart, parity
from drafthouse.loop.steps import drafter_config, load_trained
from drafthouse.progress import Progress
from drafthouse.target import Target

Dtype = Literal["bfloat16", "float32"]
_TEXTS, _TEXT_TOKENS = 2, 64  # what parity is shown on: held-out prompts and the target's own answers


@dataclass(frozen=True)
class Exported:
    """What was written, and what it has shown. `tensors`: in the checkpoint, 11 a layer and 3."""

    folder: Path
    tensors: int
    parity: tuple[Parity, ...]
    by_heart: ByHeart | None


def export(
    run: RunFolder,
    target: Target,
    name: str,
    to: Path,
    *,
    dtype: Dtype = "bfloat16",
    steps: int = 300,
    progress: Progress,
) -> Exported:
    """Write the drafter `name` of a run (from its folder, or from the store it is kept in) to `to`.

    Args:
        dtype: of the stored weights.
        steps: that a new drafter of the same shape is given to learn one text by heart; 0: leave that part out.

    Raises:
        ConfigError: it is not trained yet.
        DrafterError: it is damaged, of another target or shape, fails the gate, or something else lies at `to`; nothing
            is written then.
    """
    check_replaceable(to)
    drafter = load_trained(run, target, name).to(target.device)
    changed = differences(drafter_config(run, target).model_dump(mode="json"), drafter.config.model_dump(mode="json"))
    if changed:
        raise DrafterError(
            f"the drafter is not of the shape that the run file says ({'; '.join(changed[:3])})",
            where=name,
            fix="train it again, or restore the run file",
        )
    stored = _rounded(drafter, dtype)
    questions = prompts(run.settings.corpus, target.tokenizer)
    texts = _answered(target, stored, [question.input_ids for question in questions[:_TEXTS]])
    shown = tuple(parity(target, stored, text) for text in texts)
    failed = next((one for one in shown if not one.passed), None)
    if failed is not None:
        raise _refused(
            f"the pass that trains and the one that decodes differ by {failed.distance:.3g} (total variation,"
            f" {failed.tolerance:g} is rounding)"
        )
    learned = None
    if steps:
        longest = max(questions, key=lambda question: len(question.reference))
        learned = by_heart(target, drafter.config, longest, steps=steps, progress=progress)
        if not learned.passed:
            raise _refused(
                f"a new drafter of this shape did not learn one text by heart in {learned.steps} steps (loss"
                f" {learned.loss:.3g}): passes emitted {_listed(learned.rounds)} tokens, a whole block is"
                f" {learned.block_size}"
            )
    trained = read_config(run.drafter_path(name) / DRAFTER).get("drafthouse", {}).get("trained")
    save_drafter(to, drafter, dtype=getattr(torch, dtype), trained=trained)  # reads back what it wrote
    return Exported(to, len(drafter.state_dict()), shown, learned)


def _rounded(drafter: DFlashDrafter, dtype: Dtype) -> DFlashDrafter:
    """The drafter with the weights that the file will hold, so that the gate judges those."""
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.to(getattr(torch, dtype)))
    return drafter


def _answered(target: Target, drafter: DFlashDrafter, asked: Sequence[Any]) -> list[list[int]]:
    stepper = Stepper(target, drafter.config.target_layer_ids)
    plan = DecodeSettings(mode="chain", budget=1, max_new_tokens=_TEXT_TOKENS, rows=_TEXTS)
    answers = decode(stepper, drafter, asked, plan)
    return [[*question.tolist(), *answer.tokens] for question, answer in zip(asked, answers, strict=True)]


def _refused(why: str) -> DrafterError:
    return DrafterError(f"the export gate refuses this drafter: {why}", fix="look for a shifted tap, norm or position")


def _listed(rounds: Sequence[int]) -> str:
    return ", ".join(str(count) for count in rounds[:8])
