"""Training a drafter on hidden-state shards: deterministic from (seed, step), resumable to the bit on a CPU.

Whatever a step needs beyond the weights and the optimiser's state follows from its number: the reader's
batch, the anchors, the noise, the learning rate. A run that is killed therefore goes on from its newest whole
checkpoint exactly as if nothing had happened (on one machine with the same number of threads).

Started by torchrun, every process reads its own rows of a step (`parallel.py`); the first one writes.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
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
from drafthouse.drafter.feed import DeviceBatch, Feed
from drafthouse.drafter.gauge import Gauge
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
from drafthouse.drafter.packing import pack
from drafthouse.drafter.parallel import Parallel, Ranks, Spread, joined, like
from drafthouse.drafter.parallel import whole as whole_tensor
from drafthouse.drafter.schedule import ScheduleSettings, rate_factor
from drafthouse.drafter.sinks import SinkName, Sinks
from drafthouse.drafter.work import Work, peak_of
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
    same arguments, the first of them number `start_step`. A run of several processes also gives `rank` and
    `ranks`, which share every step's `rows * ranks` samples.
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
    attention: Implementation = Field(
        default="split",
        description="split: no wasted keys; flex: block-sparse, for long contexts on a GPU; dense: one masked SDPA",
    )
    packing: bool = Field(
        default=False, description="documents of a micro-batch share one row: no padding, no empty blocks"
    )
    compile: bool = Field(default=False, description="compile layers and loss (CUDA; a minute at the start)")
    parallel: Parallel = Field(
        default="ddp", description="between the processes of a torchrun; ddp: replicas, fsdp: sharded states"
    )
    sinks: tuple[SinkName, ...] = Field(
        default=(), description="where metrics go besides metrics.jsonl; one that fails is left out"
    )
    project: str = Field(default="drafthouse", description="name under which trackers file the run")
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


# What a run puts into its folder.
METRICS, CHECKPOINTS, DRAFTER = "metrics.jsonl", "checkpoints", "drafter"

# Settings that may change between a run and its continuation without changing any weight.
_FREE = {
    "export_dtype",
    "max_seconds",
    "log_every",
    "evaluate_every",
    "checkpoint_every",
    "keep_checkpoints",
    "loss_window",
    "sinks",
    "project",
}

Evaluate = Callable[[DFlashDrafter, int], dict[str, Any] | None]


class Observer:
    """Is told what a run does, in the training thread and between steps: a method that blocks holds the device up.

    This one does nothing; a subclass says what it wants to know.
    """

    def began(self, state: TrainingState, resumed_from: int | None) -> None:
        """Before the first step of this process, `resumed_from` as in `TrainResult`."""

    def stepped(self, row: Mapping[str, Any]) -> None:
        """After every step, with its row of metrics."""

    def saved(self, checkpoint: Path) -> None:
        """The folder of a checkpoint that is complete. It is removed when `keep_checkpoints` newer ones are there."""


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
    observer: Observer | None = None,
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
            away). What it raises ends the run as it stands.
        observer: what else wants to know how the run goes.

    Raises:
        DrafterError: the states are of another target or other layers; the checkpoints in `out_dir` are of
            other settings or none is whole; the loss is no longer a number.
        OutOfMemoryError: the batch does not fit the device.
    """
    _check_states(reader.spec, config)
    with joined(target_head.device) as ranks:
        _check_parallel(settings, ranks)
        run = _Run(reader, target_head, config, settings, out_dir, observer or Observer(), ranks)
        return run.go(progress or Silent(), evaluate, stop or (lambda: False))


def run_spec(config: DrafterConfig, settings: TrainSettings, states: Settings) -> dict[str, Any]:
    """What decides the weights of a run: a checkpoint is only continued under the same."""
    return {
        "drafter": config.model_dump(mode="json"),
        "train": settings.model_dump(mode="json", exclude=_FREE),
        "states": states.digest(),
    }


class _Run:
    """One process's share of a training run."""

    def __init__(
        self,
        reader: StatesSource,
        head: TargetHead,
        config: DrafterConfig,
        settings: TrainSettings,
        out_dir: Path,
        observer: Observer,
        ranks: Ranks,
    ) -> None:
        self.reader, self.head, self.settings, self.out_dir = reader, head, settings, out_dir
        self.ranks = ranks
        self.observer = observer if ranks.first else Observer()
        self.model = DFlashDrafter(config, attention=settings.attention, seed=settings.seed)
        self.model.to(head.device)
        self.compiled = settings.compile and head.device.type == "cuda"
        if self.compiled:
            for layer in self.model.layers:
                layer.compile()
        self.spread = Spread(self.model, ranks, settings.parallel, bf16=settings.autocast == "bf16")
        self.peak = peak_of(head.device)
        self.optimizers = build_optimizers(self.model, settings.optimizer)
        self.state = TrainingState()
        self.checkpoints = Checkpoints(out_dir / CHECKPOINTS, settings.keep_checkpoints)
        self.spec = run_spec(config, settings, reader.spec)
        if ranks.world > 1:  # which rows a step reads depends on it
            self.spec["ranks"] = ranks.world
        found = self.checkpoints.newest()
        torch.manual_seed(settings.seed)  # for whatever draws globally; our own draws have their own generators
        self.resumed_from = self._restore(found) if found else None
        self.losses = deque(self.state.losses, maxlen=settings.loss_window)

    def go(self, progress: Progress, evaluate: Evaluate | None, stop: Callable[[], bool]) -> TrainResult:
        settings, state = self.settings, self.state
        self.out_dir.mkdir(parents=True, exist_ok=True)
        log = _Log(self.out_dir, state.step, self.ranks, settings)
        started = time.perf_counter()
        stopped: Literal["finished", "time", "asked"] = "finished"
        share = {} if self.ranks.world == 1 else {"rank": self.ranks.rank, "ranks": self.ranks.world}
        batches = self.reader.batches(settings.rows, settings.seed, state.position, **share)
        feed = Feed(batches, self.head.device, teacher=settings.loss.soft_weight > 0)
        saved = state.step if self.resumed_from is not None else -1
        done = [row["step"] for row in read_metrics(log.path) if "evaluation" in row]
        evaluated = done[-1] if done else -1
        pace = _Pace(state)
        gauge = Gauge(self.head.device)
        self.observer.began(state, self.resumed_from)
        try:
            with progress.task("train", total=settings.steps) as task:
                task.advance(state.step)
                while state.step < settings.steps:
                    with fits(
                        f"{settings.rows} rows of {settings.anchors} anchors do not fit {self.head.device}",
                        where="train",
                        fix="lower train.rows, train.anchors or train.loss.chunk_blocks, raise train.accumulate",
                    ):
                        row = self._step(feed)
                    task.advance(note=f"loss {row['loss']:.3f}  streak {row['mean_streak']:.2f}")
                    self.observer.stepped(row)
                    if state.step % settings.log_every == 0 or state.step in (1, settings.steps):
                        log.write(row | pace.since_last(state, row["flops"], self._peak_of_all()) | gauge.read())
                    if settings.evaluate_every and state.step % settings.evaluate_every == 0:
                        self._evaluate(evaluate, log)
                        evaluated = state.step
                    if state.step % settings.checkpoint_every == 0:
                        self._save()
                        saved = state.step
                    if self.ranks.any(stop(), self.head.device):
                        stopped = "asked"
                        break
                    late = settings.max_seconds and time.perf_counter() - started >= settings.max_seconds
                    if self.ranks.any(bool(late), self.head.device):
                        stopped = "time"
                        break
            if state.step == settings.steps:
                stopped = "finished"
            if saved != state.step:
                self._save()
            if stopped != "asked" and evaluated != state.step:
                self._evaluate(evaluate, log)
        finally:
            feed.close()
            log.close()
        self.ranks.wait()
        rows = read_metrics(log.path)
        whole = self._whole()
        return TrainResult(
            model=whole.eval(),
            steps=state.step,
            tokens=state.tokens,
            seconds=time.perf_counter() - started,
            loss=sum(self.losses) / len(self.losses) if self.losses else math.nan,
            drafter=None if stopped == "asked" else self._export(whole),
            metrics=log.path,
            resumed_from=self.resumed_from,
            stopped=stopped,
            evaluations=[{"step": row["step"], **row["evaluation"]} for row in rows if "evaluation" in row],
        )

    def _step(self, feed: Feed) -> dict[str, Any]:
        """One optimiser step; returns its row of metrics."""
        settings, state, config = self.settings, self.state, self.model.config
        factor = rate_factor(settings.schedule, state.step, settings.steps)
        level = noise_level(settings.noise, state.step, settings.steps)
        logged = (state.step + 1) % settings.log_every == 0
        self.model.train()
        sums = SlotSums.zeros(config.block_size - 1, self.head.device)
        work, numerator, tokens = Work.zeros(self.head.device), torch.zeros((), device=self.head.device), 0
        for micro in range(settings.accumulate):
            batch = next(feed)
            with self.spread.syncing(last=micro == settings.accumulate - 1):
                loss, counted = self._loss(batch, level, entropy=logged)
                loss.numerator.backward()  # type: ignore[no-untyped-call]
            numerator += loss.numerator.detach()
            sums, work, tokens = sums + loss.sums, work + counted, tokens + batch.tokens
            state.position += 1
        # One exchange between the ranks, and one wait for the device.
        read_by_all = torch.tensor([tokens], dtype=torch.float64, device=self.head.device)
        shared = self.ranks.sum(torch.cat([numerator.double()[None], read_by_all, work.counts, sums.flat().double()]))
        sums = SlotSums.from_flat(shared[2 + work.counts.numel() :].float(), config.block_size - 1)
        norm = self._update(factor, sums.weight.sum())
        numbers = torch.cat([shared, norm.double().reshape(1)]).tolist()
        sums = SlotSums.from_flat(torch.tensor(numbers[2 + work.counts.numel() : -1]), config.block_size - 1)
        weight = float(sums.weight.sum())
        state.tokens += int(numbers[1])
        state.step += 1
        value = numbers[0] / weight if weight else 0.0
        if not math.isfinite(value) or not math.isfinite(numbers[-1]):
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
            "grad_norm": numbers[-1],
            "flops": Work(torch.tensor(numbers[2 : 2 + work.counts.numel()])).flops(config, float(sums.labels.sum())),
            **sums.summary(),
        }

    def _loss(self, batch: DeviceBatch, level: float, *, entropy: bool) -> tuple[BlockLoss, Work]:
        """Forward pass of one micro-batch."""
        settings, head, config = self.settings, self.head, self.model.config
        device, ids, mask, taps = head.device, batch.input_ids, batch.loss_mask, batch.hidden_states
        anchors = draw_anchors(mask, settings.anchors, self._generator("anchors"))
        positions = torch.arange(ids.shape[1], device=device).expand(ids.shape)
        positions = positions.masked_fill(positions >= batch.lengths[:, None], -1)
        if device.type == "cpu":
            # Accelerators keep one shape for all steps; here, work that no block looks at is left out.
            anchors = anchors[:, : max(1, int((anchors >= 0).sum(1).max()))]
            seen = max(1, int(anchors.max()))
            taps, positions = taps[:, :seen], positions[:, :seen]
        if level:
            taps = add_noise(taps, level, self._generator("noise", device))
        tokens = block_tokens(ids, anchors, config.block_size, config.mask_token_id)
        teacher = None
        if batch.last_hidden_state is not None:
            teacher = Teacher(batch.last_hidden_state.to(head.dtype), head.final_norm, head.lm_head)
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.autocast == "bf16"):
            if settings.packing:
                packed = pack(taps, batch.lengths, anchors, tokens)
                hidden = self.spread(
                    packed.taps, head.embed(packed.tokens), packed.anchors, packed.positions, packed.documents
                )
                hidden = packed.restore(hidden, *anchors.shape)
            else:
                hidden = self.spread(taps, head.embed(tokens), anchors, positions)
            loss = block_loss(
                hidden.to(head.dtype),
                anchors,
                ids,
                mask,
                head.lm_head,
                settings.loss,
                teacher=teacher,
                entropy=entropy,
                compiled=self.compiled,
            )
        return loss, Work.of(batch.lengths, anchors, config, teacher=teacher is not None)

    def _generator(self, purpose: str, device: torch.device | None = None) -> torch.Generator:
        # The first rank draws what a run of one process would.
        own = purpose if self.ranks.first else f"{purpose}/{self.ranks.rank}"
        return generator_for(self.settings.seed, self.state.position, own, device)

    def _peak_of_all(self) -> float | None:
        return None if self.peak is None else self.peak * self.ranks.world

    def _update(self, factor: float, weight: Tensor) -> Tensor:
        """Scale the summed gradient by the summed weight, clip, step; returns the norm before clipping."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        # The ranks' gradients arrive averaged. Without any label all of them are zero, and so is the weight.
        torch._foreach_mul_(gradients, self.ranks.world / weight.clamp_min(torch.finfo(torch.float32).tiny))
        norm = whole_tensor(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.optimizer.clip))
        if weight > 0:
            set_rate(self.optimizers, factor)
            for optimizer in self.optimizers.values():
                optimizer.step()
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        return norm

    def _evaluate(self, evaluate: Evaluate | None, log: _Log) -> None:
        if evaluate is None:
            return
        model = self._whole().eval()
        # The hook may draw random numbers; they are its own.
        if self.ranks.first:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                result = evaluate(model, self.state.step)
            if result is not None:
                log.write({"step": self.state.step, "evaluation": result})
        self.ranks.wait()

    def _whole(self) -> DFlashDrafter:
        """The model with all of its weights: itself, or a gathered copy of a sharded one."""
        if not self.spread.sharded:
            return self.model
        model = DFlashDrafter(self.model.config, attention=self.settings.attention).to(self.head.device)
        model.load_state_dict(self.spread.plain_weights())
        return model

    def _save(self) -> None:
        state = dataclasses.replace(self.state, losses=list(self.losses))
        training = optimizer_tensors(self.model, self.optimizers) | {"rng": torch.get_rng_state()}
        weights = self.spread.plain_weights()
        if self.ranks.first:
            self.observer.saved(self.checkpoints.save(self.spec, state, weights, training))
        self.ranks.wait()

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
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(like(checkpoint.weights[name], parameter))
        restore_optimizers(self.model, self.optimizers, training)
        self.state = checkpoint.state
        return checkpoint.state.step

    def _export(self, model: DFlashDrafter) -> Path:
        trained = {
            "steps": self.state.step,
            "of_steps": self.settings.steps,
            "tokens": self.state.tokens,
            "seed": self.settings.seed,
            "states": self.spec["states"],
            "settings": self.settings.digest(),
        }
        dtype = torch.bfloat16 if self.settings.export_dtype == "bfloat16" else torch.float32
        folder = self.out_dir / DRAFTER
        if self.ranks.first:
            folder = save_drafter(folder, model, dtype=dtype, trained=trained)
        self.ranks.wait()
        return folder


class _Log:
    """metrics.jsonl and the other sinks; the first rank's alone."""

    def __init__(self, out_dir: Path, step: int, ranks: Ranks, settings: TrainSettings) -> None:
        self.path = out_dir / METRICS
        self._lines = MetricsLog(self.path, step) if ranks.first else None
        self._sinks = Sinks(
            settings.sinks if ranks.first else (),
            project=settings.project,
            run=out_dir.name,
            folder=out_dir,
            settings=settings.model_dump(mode="json"),
        )
        ranks.wait()

    def write(self, row: Mapping[str, Any]) -> None:
        if self._lines is not None:
            self._lines.write(row)
            self._sinks.write(int(row["step"]), row)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._sinks.close()


class _Pace:
    """Tokens a second, and the share of the device's peak, since the last row."""

    def __init__(self, state: TrainingState) -> None:
        self.tokens, self.time, self.step = state.tokens, time.perf_counter(), state.step
        self.started = self.time

    def since_last(self, state: TrainingState, flops: float, peak: float | None) -> dict[str, float]:
        """Rates since the last call; `mfu` takes the last step's `flops` for every step's (see `work.py`)."""
        now = time.perf_counter()
        took = max(now - self.time, 1e-9)
        row = {"tokens_per_s": (state.tokens - self.tokens) / took, "seconds": now - self.started}
        if peak is not None:
            row["mfu"] = flops * (state.step - self.step) / took / peak
        self.tokens, self.time, self.step = state.tokens, now, state.step
        return row


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


def _check_parallel(settings: TrainSettings, ranks: Ranks) -> None:
    if ranks.world > 1 and settings.parallel == "fsdp" and settings.optimizer.kind == "muon":
        raise DrafterError(
            "muon orthogonalises whole matrices, which a sharded run does not hold",
            where="train.parallel",
            fix="use parallel: ddp, or optimizer.kind: adamw",
        )
