"""Train a small hybrid on packed rows: for tens of millions of parameters and minutes of a GPU.

The embedded target's recipe (Muon and AdamW, warm-up, constant, linear to zero) at the rate that a GPU gives: full
rows, matrix products for the recurrence, bfloat16 layers. Training ends after a number of steps, or after a time: the
rate follows the share of it that is spent, so that a slower device trains less, and as well-annealed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
import transformers
from pydantic import Field, model_validator
from torch import nn

from drafthouse.config import Settings, digest_of
from drafthouse.errors import TargetError
from drafthouse.memory import fits
from drafthouse.target.flat import FlatTexts, packed_rows
from drafthouse.target.packed import PackedModel, tensor_cores
from drafthouse.target.stacked_muon import StackedMuon
from drafthouse.target.tiny import (
    Sample,
    TinyShape,
    build_optimizers,
    check_replaceable,
    held_out_accuracy,
    initialise,
    write_target,
)


class PackedTraining(Settings):
    """How a target is trained on packed rows."""

    steps: int | None = Field(None, ge=1, description="ends training after so many steps")
    seconds: float | None = Field(None, gt=0.0, description="ends training after so long, compiling left out")
    rows: int = Field(64, ge=1, description="rows a step")
    width: int = Field(512, ge=64, multiple_of=64, description="tokens a row; longer texts are left out")
    muon_lr: float = Field(0.004, gt=0, description="hidden matrices (Muon)")
    adam_lr: float = Field(0.002, gt=0, description="embeddings, head, norms, convolutions (AdamW)")
    warmup_steps: int = Field(100, ge=0)
    decay_fraction: float = Field(0.4, gt=0, le=1, description="last share of the training, the rate falling to 0")
    clip_norm: float = Field(1.0, gt=0)
    other_token_weight: float = Field(0.5, ge=0, description="loss weight of tokens outside assistant turns")
    matmuls: Literal["float32", "bfloat16"] = Field("float32", description="of layers and head; bfloat16 on a GPU")
    compiled: bool = Field(False, description="compile layers and head (CUDA; some minute at the start)")
    seed: int = 0
    log_every: int = Field(25, ge=1)

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if (self.steps is None) == (self.seconds is None):
            raise ValueError("give either steps or seconds")
        return self

    def spent(self, step: int, elapsed: float) -> float:
        """Share of the training that lies behind, 0 to 1 and beyond."""
        return step / self.steps if self.steps is not None else elapsed / (self.seconds or 1.0)


def rate_factor(step: int, spent: float, training: PackedTraining) -> float:
    """Factor of the peak rate: warm-up by steps, then constant, then linear to zero by the share spent."""
    warm = min(1.0, (step + 1) / max(1, training.warmup_steps))
    return warm * min(1.0, max(0.0, 1.0 - spent) / training.decay_fraction)


def train_packed(
    texts: FlatTexts,
    held_out: Mapping[str, Sequence[Sample]],
    tokenizer: Any,
    out: Path,
    shape: TinyShape,
    training: PackedTraining,
    *,
    device: str | torch.device = "cpu",
    provenance: dict[str, Any] | None = None,
    on_log: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Train from random weights and write a model folder that `Target.load` reads.

    Args:
        held_out: texts of each kind that only the held-out loss sees.
        provenance: what else to keep in training.json (data hash, command).

    Returns:
        The content of training.json, as of `train_tiny`, with `held_out_kinds` beside `held_out`, and `tokens_per_s`
        after the first steps.

    Raises:
        TargetError: no text fits a row, the vocabulary is too large, or `out` holds something that is no trained small
            target.
        OutOfMemoryError: the batch does not fit the device.
    """
    if len(tokenizer) > 1 << 16:
        raise TargetError(f"{len(tokenizer)} tokens", where="tokenizer", fix="use one of at most 65,536")
    check_replaceable(out)
    pad_id = int(tokenizer.pad_token_id)
    model = transformers.Qwen3_5ForCausalLM(shape.to_config(len(tokenizer), int(tokenizer.eos_token_id), pad_id))
    initialise(model, training.seed)
    model.to(device).train()
    curve: list[dict[str, Any]] = []
    size = f"{training.rows} rows of {training.width} tokens"
    with tensor_cores(), fits(f"{size} do not fit {device}", where="rows", fix="lower it"):
        report = _loop(model, texts, training, torch.device(device), pad_id, curve, on_log)
    # What is stored is what is judged. Parameters only: rounded rotary frequencies would be another model.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    kinds = {kind: held_out_accuracy(model, some, pad_id, device) for kind, some in held_out.items() if some}
    answers = {kind: sum(int(sample.loss_mask[1:].sum()) for sample in held_out[kind]) for kind in kinds}
    report |= {
        "shape": shape.model_dump(),
        "training": training.model_dump() | {"steps": report["steps"]},
        "settings_digest": digest_of({"shape": shape.model_dump(), "training": training.model_dump()}),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "samples": len(texts),
        "text_tokens": len(texts.ids),
        "device": str(device),
        "held_out": _mean(kinds, answers) if kinds else None,
        "held_out_kinds": kinds,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "curve": curve,
        **(provenance or {}),
    }
    write_target(model, tokenizer, out, report)
    return report


def _mean(kinds: dict[str, dict[str, float]], answers: dict[str, int]) -> dict[str, float]:
    """Loss and accuracy over the answer tokens of all kinds."""
    everything = max(1, sum(answers.values()))
    names = next(iter(kinds.values()))
    return {name: round(sum(answers[k] * kinds[k][name] for k in kinds) / everything, 5) for name in names}


def _loop(
    model: nn.Module,
    texts: FlatTexts,
    training: PackedTraining,
    device: torch.device,
    pad_id: int,
    curve: list[dict[str, Any]],
    on_log: Callable[[dict[str, Any]], None] | None,
) -> dict[str, Any]:
    """The optimiser steps; fills `curve`. The clock starts behind the first step, which compiles."""
    dtype = torch.bfloat16 if training.matmuls == "bfloat16" else torch.float32
    runner = PackedModel(model, dtype, compiled=training.compiled)
    optimizers = build_optimizers(model, training.muon_lr, training.adam_lr, StackedMuon)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    source = packed_rows(texts, training.rows, training.width, training.seed, pad_id)
    cuda = device.type == "cuda"
    called, began, first_step = time.perf_counter(), time.perf_counter(), 0.0
    step = tokens = 0
    while True:
        spent = training.spent(step, time.perf_counter() - began)
        if step and spent >= 1.0:
            break
        batch = next(source)
        tokens += int((batch.ids != pad_id).sum())
        batch = batch.pin().to(device) if cuda else batch
        factor = rate_factor(step, spent, training)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * factor
            optimizer.zero_grad(set_to_none=True)
        loss, own, accuracy = runner.loss(batch, training.other_token_weight)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
        for optimizer in optimizers:
            optimizer.step()
        step += 1
        # Reading the loss also keeps the clock honest: launches run ahead of the device.
        if step == 1 or step % training.log_every == 0 or step == training.steps:
            entry = {
                "step": step,
                "tokens": tokens,
                "loss": round(loss.item(), 5),
                "assistant_loss": round(float(own), 5),
                "assistant_accuracy": round(float(accuracy), 4),
                "rate": round(factor, 4),
                "seconds": round(time.perf_counter() - began, 2),
            }
            if step == 1:
                first_step, began = time.perf_counter() - called, time.perf_counter()
            curve.append(entry)
            if on_log is not None:
                on_log(entry)
    if cuda:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    return {
        "steps": step,
        "tokens": tokens,
        "epochs": round(tokens / max(1, len(texts.ids)), 3),
        "seconds": round(seconds, 1),
        "first_step_seconds": round(first_step, 1),
        "tokens_per_s": round((step - 1) * tokens / step / max(seconds, 1e-9)),
        "peak_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if cuda else None,
    }
