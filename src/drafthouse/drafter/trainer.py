"""Training a drafter on hidden-state shards: deterministic from (seed, step), resumable to the bit on a CPU.

Whatever a step needs beyond the weights and the optimiser's state follows from its number: the reader's
batch, the anchors, the noise, the learning rate. A run that is killed therefore goes on from its newest whole
checkpoint exactly as if nothing had happened (on one machine with the same number of threads).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from drafthouse.config import Settings, differences
from drafthouse.drafter.anchors import block_tokens, draw_anchors, generator_for
from drafthouse.drafter.attention import Implementation
from drafthouse.drafter.checkpoint import Checkpoint, Checkpoints, TrainingState
from drafthouse.drafter.config import DrafterConfig
from drafthouse.drafter.export import save_drafter
from drafthouse.drafter.losses import BlockLoss, LossSettings, Teacher, block_loss
from drafthouse.drafter.metrics import MetricsLog, SlotSums, read_metrics
from drafthouse.drafter.model import DFlashDrafter
from drafthouse.drafter.noise import NoiseSettings, add_noise, noise_level
from drafthouse.drafter.optimizers import (
    OptimizerSettings,
    build_optimizers,
    optimizer_tensors,
    restore_optimizers,
    set_rate,
)
from drafthouse.drafter.schedule import ScheduleSettings, rate_factor
from drafthouse.errors import DrafterError
from drafthouse.memory import fits
from drafthouse.progress import Progress, Silent


class TargetHead(Protocol):
    """The frozen parts of the target that a drafter borrows."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def embed(self, ids: Tensor) -> Tensor: ...
    def final_norm(self, hidden: Tensor) -> Tensor: ...
    def lm_head(self, hidden: Tensor) -> Tensor: ...


class Batch(Protocol):
    """Documents as rows, right-padded."""

    @property
    def input_ids(self) -> Tensor: ...
    @property
    def loss_mask(self) -> Tensor: ...
    @property
    def lengths(self) -> Tensor: ...
    @property
    def hidden_states(self) -> Tensor: ...
    @property
    def last_hidden_state(self) -> Tensor: ...


class StatesSource(Protocol):
    """What the trainer needs of a states run; `drafthouse.states.StatesReader` is one.

    `spec` has `target`, `layer_ids`, `hidden_size` and `digest()`; `batches` yields the same batches for the
    same arguments, the first of them number `start_step`.
    """

    @property
    def spec(self) -> Any: ...
    def batches(self, rows: int, seed: int, start_step: int) -> Iterator[Any]: ...


class TrainSettings(Settings):
    """How a drafter is trained."""

    steps: int = Field(default=1000, gt=0, description="optimiser steps; schedule and noise run over all of them")
    rows: int = Field(default=8, gt=0, description="documents in one micro-batch")
    anchors: int = Field(default=24, gt=0, description="blocks drawn from each document")
    accumulate: int = Field(default=1, gt=0, description="micro-batches summed for one step, exactly")
    seed: int = Field(default=0, ge=0, description="of initialisation, data order, anchors and noise")
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = Field(default_factory=ScheduleSettings)
    loss: LossSettings = Field(default_factory=LossSettings)
    noise: NoiseSettings = Field(default_factory=NoiseSettings)
    autocast: Literal["off", "bf16"] = Field(default="off", description="bf16 matrix products; weights stay fp32")
    attention: Implementation = Field(default="split", description="split: no wasted keys; dense: one masked SDPA")
    export_dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="of the exported weights")
    max_seconds: float | None = Field(
        default=None,
        gt=0.0,
        description="stop after this much wall time of this process, wherever the schedule stands",
    )
    log_every: int = Field(default=10, gt=0, description="steps between rows of metrics.jsonl")
    evaluate_every: int = Field(default=0, ge=0, description="steps between held-out evaluations; 0: only at the end")
    checkpoint_every: int = Field(default=200, gt=0, description="steps between checkpoints")
    keep_checkpoints: int = Field(default=2, gt=0)
    loss_window: int = Field(default=50, gt=0, description="steps that `loss_mean` averages over")


# Settings that may change between a run and its continuation without changing any weight.
_FREE = {
    "export_dtype",
    "max_seconds",
    "log_every",
    "evaluate_every",
    "checkpoint_every",
    "keep_checkpoints",
    "loss_window",
}

Evaluate = Callable[[DFlashDrafter, int], dict[str, Any] | None]


@dataclass(frozen=True)
class TrainResult:
    """What a call of `train` leaves behind.

    Attributes:
        model: the trained drafter, in eval mode.
        steps, tokens: done in the whole run, earlier processes included.
        seconds: wall time of this process.
        loss: mean over the last `loss_window` steps.
        drafter: the exported folder; None when the run was asked to stop before its end.
        metrics: the JSON lines file.
        resumed_from: step of the checkpoint that this process started from; None for a fresh start.
        stopped: `finished`, `time` (max_seconds) or `asked` (the stop callback).
        evaluations: every held-out evaluation of the run, each with its `step`.
    """

    model: DFlashDrafter
    steps: int
    tokens: int
    seconds: float
    loss: float
    drafter: Path | None
    metrics: Path
    resumed_from: int | None
    stopped: Literal["finished", "time", "asked"]
    evaluations: list[dict[str, Any]]


def train(
    reader: StatesSource,
    target_head: TargetHead,
    config: DrafterConfig,
    settings: TrainSettings,
    out_dir: Path,
    *,
    progress: Progress | None = None,
    evaluate: Evaluate | None = None,
    stop: Callable[[], bool] | None = None,
) -> TrainResult:
    """Train a drafter, or go on with a run that was interrupted, and export it.

    Args:
        reader: hidden states of the target.
        target_head: embedding, final norm and lm_head of that target.
        config: the drafter's shape.
        settings: how to train.
        out_dir: gets metrics.jsonl, checkpoints/ and drafter/.
        progress: where to show the bar.
        evaluate: called with the model in eval mode and the step; its dictionary goes to metrics.jsonl.
        stop: asked after every step; True writes a checkpoint and returns (e.g. a node that is being taken
            away).

    Raises:
        DrafterError: the states are of another target or other layers; the checkpoints in `out_dir` are of
            other settings or none is whole; the loss is no longer a number.
        OutOfMemoryError: the batch does not fit the device.
    """
    _check_states(reader.spec, config)
    run = _Run(reader, target_head, config, settings, out_dir)
    return run.go(progress or Silent(), evaluate, stop or (lambda: False))


class _Run:
    """One process's share of a training run."""

    def __init__(
        self,
        reader: StatesSource,
        head: TargetHead,
        config: DrafterConfig,
        settings: TrainSettings,
        out_dir: Path,
    ) -> None:
        self.reader, self.head, self.settings, self.out_dir = reader, head, settings, out_dir
        self.model = DFlashDrafter(config, attention=settings.attention)
        self.model.reset_parameters(settings.seed)
        self.model.to(head.device)
        self.optimizers = build_optimizers(self.model, settings.optimizer)
        self.state = TrainingState()
        self.checkpoints = Checkpoints(out_dir / "checkpoints", settings.keep_checkpoints)
        self.spec = {
            "drafter": config.model_dump(mode="json"),
            "train": settings.model_dump(mode="json", exclude=_FREE),
            "states": reader.spec.digest(),
        }
        found = self.checkpoints.newest()
        torch.manual_seed(settings.seed)  # for whatever draws globally; our own draws have their own generators
        self.resumed_from = self._restore(found) if found else None
        self.losses = deque(self.state.losses, maxlen=settings.loss_window)

    def go(self, progress: Progress, evaluate: Evaluate | None, stop: Callable[[], bool]) -> TrainResult:
        settings, state = self.settings, self.state
        self.out_dir.mkdir(parents=True, exist_ok=True)
        log = MetricsLog(self.out_dir / "metrics.jsonl", state.step)
        started = time.perf_counter()
        stopped: Literal["finished", "time", "asked"] = "finished"
        batches = self.reader.batches(settings.rows, settings.seed, state.position)
        saved = state.step if self.resumed_from is not None else -1
        done = [row["step"] for row in read_metrics(log.path) if "evaluation" in row]
        evaluated = done[-1] if done else -1
        pace = _Pace(state)
        try:
            with progress.task("train", total=settings.steps) as task:
                task.advance(state.step)
                while state.step < settings.steps:
                    with fits(
                        f"{settings.rows} rows of {settings.anchors} anchors do not fit {self.head.device}",
                        where="train",
                        fix="lower train.rows, train.anchors or train.loss.chunk_blocks, raise train.accumulate",
                    ):
                        row = self._step(batches)
                    task.advance(note=f"loss {row['loss']:.3f}  streak {row['mean_streak']:.2f}")
                    if state.step % settings.log_every == 0 or state.step in (1, settings.steps):
                        log.write(row | pace.since_last(state))
                    if settings.evaluate_every and state.step % settings.evaluate_every == 0:
                        self._evaluate(evaluate, log)
                        evaluated = state.step
                    if state.step % settings.checkpoint_every == 0:
                        self._save()
                        saved = state.step
                    if stop():
                        stopped = "asked"
                        break
                    if settings.max_seconds and time.perf_counter() - started >= settings.max_seconds:
                        stopped = "time"
                        break
            if state.step == settings.steps:
                stopped = "finished"
            if saved != state.step:
                self._save()
            if stopped != "asked" and evaluated != state.step:
                self._evaluate(evaluate, log)
        finally:
            log.close()
        rows = read_metrics(log.path)
        return TrainResult(
            model=self.model.eval(),
            steps=state.step,
            tokens=state.tokens,
            seconds=time.perf_counter() - started,
            loss=sum(self.losses) / len(self.losses) if self.losses else math.nan,
            drafter=None if stopped == "asked" else self._export(),
            metrics=log.path,
            resumed_from=self.resumed_from,
            stopped=stopped,
            evaluations=[{"step": row["step"], **row["evaluation"]} for row in rows if "evaluation" in row],
        )

    def _step(self, batches: Iterator[Batch]) -> dict[str, Any]:
        """One optimiser step; returns its row of metrics."""
        settings, state, model = self.settings, self.state, self.model
        factor = rate_factor(settings.schedule, state.step, settings.steps)
        level = noise_level(settings.noise, state.step, settings.steps)
        logged = (state.step + 1) % settings.log_every == 0
        model.train()
        numerator, sums = 0.0, SlotSums.zeros(model.config.block_size - 1, self.head.device)
        for _ in range(settings.accumulate):
            batch = next(batches)
            loss = self._loss(batch, level, entropy=logged)
            loss.numerator.backward()  # type: ignore[no-untyped-call]
            numerator += float(loss.numerator.detach())
            sums = sums + loss.sums
            state.tokens += int(batch.lengths.sum())
            state.position += 1
        weight = float(sums.weight.sum())
        norm = self._update(factor, weight)
        state.step += 1
        value = numerator / weight if weight else 0.0
        if not math.isfinite(value) or not math.isfinite(norm):
            raise DrafterError(
                f"the loss is no longer a number at step {state.step}",
                where="train",
                fix="lower train.optimizer.lr, or look for damaged states",
            )
        if weight:
            self.losses.append(value)
        return {
            "step": state.step,
            "tokens": state.tokens,
            "loss": value,
            "loss_mean": sum(self.losses) / max(1, len(self.losses)),
            "lr": settings.optimizer.lr * factor,
            "noise": level,
            "grad_norm": norm,
            **sums.summary(),
        }

    def _loss(self, batch: Batch, level: float, *, entropy: bool) -> BlockLoss:
        """Forward pass of one micro-batch."""
        settings, model, head = self.settings, self.model, self.head
        config, device = model.config, head.device
        mask = batch.loss_mask.to(device)
        ids = batch.input_ids.to(device)
        anchors = draw_anchors(mask, settings.anchors, generator_for(settings.seed, self.state.position, "anchors"))
        taps = batch.hidden_states
        positions = torch.arange(ids.shape[1]).expand(ids.shape)
        positions = positions.masked_fill(positions >= batch.lengths[:, None], -1)
        if device.type == "cpu":
            # Accelerators keep one shape for all steps; here, work that no block looks at is left out.
            anchors = anchors[:, : max(1, int((anchors >= 0).sum(1).max()))]
            seen = max(1, int(anchors.max()))
            taps, positions = taps[:, :seen], positions[:, :seen]
        taps = add_noise(taps, level, generator_for(settings.seed, self.state.position, "noise"))
        tokens = block_tokens(ids, anchors, config.block_size, config.mask_token_id)
        teacher = None
        if settings.loss.soft_weight > 0:
            last = batch.last_hidden_state.to(device, head.dtype)
            teacher = Teacher(last, head.final_norm, head.lm_head)
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.autocast == "bf16"):
            hidden = model(taps.to(device), head.embed(tokens), anchors, positions.to(device))
            return block_loss(
                hidden.to(head.dtype),
                anchors,
                ids,
                mask,
                head.lm_head,
                settings.loss,
                teacher=teacher,
                entropy=entropy,
            )

    def _update(self, factor: float, weight: float) -> float:
        """Scale the summed gradient by the summed weight, clip, step; returns the norm before clipping."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = 0.0
        if weight:
            torch._foreach_div_(gradients, weight)
            total = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.optimizer.clip)
            norm = float(total)
            set_rate(self.optimizers, factor)
            for optimizer in self.optimizers.values():
                optimizer.step()
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        return norm

    def _evaluate(self, evaluate: Evaluate | None, log: MetricsLog) -> None:
        if evaluate is None:
            return
        self.model.eval()
        # The hook may draw random numbers; they are its own.
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            result = evaluate(self.model, self.state.step)
        if result is not None:
            log.write({"step": self.state.step, "evaluation": result})

    def _save(self) -> None:
        state = dataclasses.replace(self.state, losses=list(self.losses))
        training = optimizer_tensors(self.model, self.optimizers) | {"rng": torch.get_rng_state()}
        self.checkpoints.save(self.spec, state, self.model.state_dict(), training)

    def _restore(self, checkpoint: Checkpoint) -> int:
        changed = differences(checkpoint.spec, self.spec)
        if changed:
            raise DrafterError(
                f"the checkpoint is of a run with other settings ({'; '.join(changed)})",
                where=str(checkpoint.path),
                fix="restore those settings or use another output folder",
            )
        training = dict(checkpoint.training)
        torch.set_rng_state(training.pop("rng"))
        self.model.load_state_dict(checkpoint.weights)
        restore_optimizers(self.model, self.optimizers, training)
        self.state = checkpoint.state
        return checkpoint.state.step

    def _export(self) -> Path:
        trained = {
            "steps": self.state.step,
            "of_steps": self.settings.steps,
            "tokens": self.state.tokens,
            "seed": self.settings.seed,
            "states": self.spec["states"],
            "settings": self.settings.digest(),
        }
        dtype = torch.bfloat16 if self.settings.export_dtype == "bfloat16" else torch.float32
        return save_drafter(self.out_dir / "drafter", self.model, dtype=dtype, trained=trained)


class _Pace:
    """Tokens per second since the last row."""

    def __init__(self, state: TrainingState) -> None:
        self.tokens, self.time = state.tokens, time.perf_counter()
        self.started = self.time

    def since_last(self, state: TrainingState) -> dict[str, float]:
        now = time.perf_counter()
        rate = (state.tokens - self.tokens) / max(now - self.time, 1e-9)
        self.tokens, self.time = state.tokens, now
        return {"tokens_per_s": rate, "seconds": now - self.started}


def _check_states(spec: Any, config: DrafterConfig) -> None:
    pairs = {
        "target": (spec.target, config.target_identity),
        "layer_ids": (list(spec.layer_ids), list(config.target_layer_ids)),
        "hidden_size": (spec.hidden_size, config.hidden_size),
    }
    for name, (states, drafter) in pairs.items():
        if states != drafter and not (name == "target" and not drafter):
            raise DrafterError(
                f"the hidden states have {name} {states}, the drafter wants {drafter}",
                where="train",
                fix="extract states for this drafter or change its config",
            )
