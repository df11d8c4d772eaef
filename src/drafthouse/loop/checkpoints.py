"""A training run that survives its node: its checkpoints, its curve and its drafter, in a store.

Below `drafters/<recipe>/` of the store:

    checkpoints/<step>-<epoch>/…    see `loop.committed`; the files of a local checkpoint and metrics.jsonl as it was
    drafter/<step>-<epoch>/…        the exported drafter and the whole metrics.jsonl
    progress/<epoch>                what the trainer of that epoch last said of itself, overwritten
    metrics/<epoch>.jsonl           its curve so far, overwritten

The training is never held up: checkpoints are published by one background thread, the fence is asked and progress
told by another. A store that fails meanwhile costs nothing but the copies, which are made up for when it is back.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from drafthouse.drafter import TrainResult, load_drafter
from drafthouse.drafter.checkpoint import FILES, MANIFEST, Checkpoints, TrainingState, verify
from drafthouse.drafter.durable import replace_folder, sha256_of, write_file
from drafthouse.drafter.export import CONFIG, WEIGHTS
from drafthouse.drafter.metrics import read_metrics
from drafthouse.drafter.trainer import CHECKPOINTS, DRAFTER, METRICS, Observer
from drafthouse.errors import DrafterError, StoreError
from drafthouse.loop.committed import ABANDONED, Committed, CommittedFolders, DamagedError
from drafthouse.loop.drafters import drafters_in, fetch_drafter
from drafthouse.loop.job import FenceWatch
from drafthouse.loop.uploader import Parcel, Uploader
from drafthouse.store import FencedError, Store
from drafthouse.store.body import to_body
from drafthouse.store.translate import explain

TICK_S, PROGRESS_EVERY_S, METRICS_EVERY_S = 0.5, 2.0, 10.0
# A step, or an evaluation, may take minutes; whoever looks must see that the training lives.
ALIVE_EVERY_S = 20.0
# Longer than the second in which S3 tells time.
SETTLE_S = 3.0

_EPOCH, _UPLOADS, _PARTIAL = "epoch", "uploads", "fetched.partial"
_ENDS = {"finished": "finished", "time": "out of time", "asked": "stopped"}
_log = logging.getLogger(__name__)


class Copies(Observer):
    """What one training process keeps in the store; a context manager around `restore`, the training and `finish`.

    Args:
        store: of the job, or of the run.
        recipe: name of the drafter.
        folder: of its training on this machine.
        spec: `drafter.trainer.run_spec` of it: copies of another one are refused.
        steps: of the whole run.
        keep: how many checkpoints the store keeps.
        watch: the fence of the job; None outside of one.
        who: for people who read progress and manifests (job, node, worker).
    """

    def __init__(
        self,
        store: Store,
        recipe: str,
        folder: Path,
        spec: Mapping[str, Any],
        *,
        steps: int,
        keep: int,
        watch: FenceWatch | None = None,
        who: Mapping[str, str] | None = None,
    ) -> None:
        self._folder, self._spec, self._keep, self._watch = folder, dict(spec), keep, watch
        self._store = store.child(f"drafters/{recipe}")
        self._checkpoints = CommittedFolders(self._store.child("checkpoints"), watch, (*FILES, METRICS))
        self._drafters = drafters_in(store, recipe, watch)
        self._epoch = watch.epoch if watch else 0
        self._who = dict(who or {})
        self._said: dict[str, Any] = {**self._who, "recipe": recipe, "epoch": self._epoch, "steps": steps}
        self._said |= {"step": 0, "tokens": 0, "loss": None, "resumed_from": None, "stored": None}
        self._said |= {"state": "training", "finished": False}
        self._steps = steps
        self._told: dict[str, Any] = {}
        self._told_at = 0.0
        self._told_bytes = -1
        self._passed_over: set[Committed] = set()
        self._uploader = Uploader(folder / _UPLOADS, self._publish)
        self._failure: BaseException | None = None
        self._begun = False
        self._over = threading.Event()
        self._pulse = threading.Thread(target=self._beat, name="training-progress", daemon=True)

    def __enter__(self) -> Copies:
        self._store.probe()  # manifests are create-only
        self.ask()
        self._uploader.start()
        self._pulse.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_pulse()
        if kind is None:
            self._uploader.close()
        elif issubclass(kind, FencedError) or not issubclass(kind, Exception):
            self._uploader.abandon()
        else:
            try:
                self._uploader.close()  # what was saved before the error is whole
            except Exception as second:  # the first error is the one to tell
                _log.warning("the newest checkpoint is not stored: %s", second)

    def ask(self) -> None:
        """Return when this life of the job still counts, as far as is known: it is asked at most every 5 seconds.

        Raises:
            FencedError: the job was moved elsewhere.
        """
        if self._watch is not None:
            self._watch()

    def check(self) -> None:
        """Like `ask`, without a request: what the threads have found out.

        Raises:
            FencedError: the job was moved elsewhere.
        """
        if self._failure is not None:
            raise self._failure
        self._uploader.check()

    def restore(self) -> None:
        """Put the newest checkpoint that counts and verifies into the training's folder, unless it is there already.

        Raises:
            DrafterError: it is of other settings, or there are checkpoints and none is whole.
            StoreError: the store cannot be reached, or the disk is full.
        """
        local = Checkpoints(self._folder / CHECKPOINTS)
        shutil.rmtree(local.folder / _PARTIAL, ignore_errors=True)  # of a process that was killed while it fetched
        self._sweep()
        stored = self._checkpoints.counting()
        self._take_over(local, stored)
        here = next((path for path in reversed(local.folders()) if verify(path) is None), None)
        problems = []
        for one in stored:
            try:
                self._checkpoints.about(one, self._spec)
                if here is not None and one.step <= _step_of(here):
                    break
                self._fetch(one, local)
                return
            except DamagedError as error:
                problems.append(str(error))
                self._passed_over.add(one)
                _log.warning("the checkpoint %s is passed over: %s", one.key, error.what)
        if here is None and problems:
            raise DrafterError(
                f"no checkpoint is whole ({'; '.join(problems)})",
                where=self._store.url,
                fix="delete the checkpoints there to start anew",
            )
        if here is not None and _step_of(here) not in {one.step for one in stored if one not in self._passed_over}:
            self._offer(_step_of(here), here)  # the process that saved it ended before it was stored

    def finished(self, device: str | torch.device) -> TrainResult | None:
        """The result of a run that was finished, on whatever node; its drafter is copied to this one.

        Raises:
            DrafterError: it is of other settings, or of another target.
        """
        for one in self._drafters.counting():
            if one.step < self._steps:
                continue
            try:
                about = fetch_drafter(self._drafters, one, self._folder, self._spec)
            except DamagedError as error:
                _log.warning("the finished drafter %s is passed over: %s", one.key, error.what)
                continue
            rows = read_metrics(self._folder / METRICS)
            self._said |= {"step": one.step, "tokens": about["tokens"], "loss": about["loss"], "resumed_from": one.step}
            self._say_last("finished")
            return TrainResult(
                model=load_drafter(self._folder / DRAFTER, device=device),
                steps=one.step,
                tokens=about["tokens"],
                seconds=0.0,
                loss=math.nan if about["loss"] is None else about["loss"],
                drafter=self._folder / DRAFTER,
                metrics=self._folder / METRICS,
                resumed_from=one.step,
                stopped="finished",
                evaluations=[{"step": row["step"], **row["evaluation"]} for row in rows if "evaluation" in row],
            )
        return None

    def finish(self, result: TrainResult) -> None:
        """After the training: wait for the uploads, publish its drafter, say how it ended.

        Raises:
            FencedError: the job was moved elsewhere: what was not published yet never will be.
            StoreError: the store failed time and again. Everything is still on this machine.
        """
        self._uploader.close()
        if result.drafter is not None:
            files = {name: result.drafter / name for name in (CONFIG, WEIGHTS)} | {METRICS: result.metrics}
            loss = result.loss if math.isfinite(result.loss) else None
            about = {"spec": self._spec, "tokens": result.tokens, "loss": loss, **self._who}
            self._drafters.publish(result.steps, files, about)
            self._drafters.prune(keep=1)
        self._say_last(result.stopped)
        if self._watch is not None:
            self._settle()

    def began(self, state: TrainingState, resumed_from: int | None) -> None:
        self._said |= {"step": state.step, "tokens": state.tokens, "resumed_from": resumed_from}
        # Before, a refused start must not speak over the run, and the curve may hold steps that are not reached yet.
        self._begun = True

    def stepped(self, row: Mapping[str, Any]) -> None:
        self._said |= {name: row[name] for name in ("step", "tokens", "loss", "loss_mean")}

    def saved(self, checkpoint: Path) -> None:
        self._offer(_step_of(checkpoint), checkpoint)

    def _offer(self, step: int, checkpoint: Path) -> None:
        try:
            self._uploader.offer(step, {name: checkpoint / name for name in FILES}, {METRICS: self._folder / METRICS})
        except OSError as error:
            # It is complete on this machine, and the training can go on: only its copy is missing.
            _log.warning("the checkpoint of step %d is not stored: %s", step, error)

    def _publish(self, parcel: Parcel) -> None:
        self._checkpoints.publish(parcel.step, parcel.files, {"spec": self._spec, **self._who})
        self._said["stored"] = parcel.step
        self._checkpoints.prune(self._keep, self._passed_over)

    def _fetch(self, one: Committed, local: Checkpoints) -> None:
        partial = local.folder / _PARTIAL
        try:
            self._checkpoints.fetch(one, partial)
            (partial / METRICS).replace(self._folder / METRICS)
            replace_folder(partial, local.place(one.step))
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        self._said["stored"] = one.step

    def _sweep(self) -> None:
        """Remove the parts of uploads that were killed: they show nowhere and take as much space as a checkpoint."""
        try:
            self._store.sweep(older_than_s=ABANDONED.total_seconds())
        except StoreError as error:
            _log.warning("uploads that were cut short stay in the store: %s", error)

    def _take_over(self, local: Checkpoints, stored: list[Committed]) -> None:
        """Drop local checkpoints that an earlier life left here and never stored, if the store has any that count.

        That life may have gone on behind its fence, where what it did does not count.
        """
        if self._watch is None:
            return
        file = self._folder / _EPOCH
        last = file.read_text(encoding="ascii", errors="replace").strip() if file.exists() else ""
        if last.isdigit() and int(last) < self._epoch and stored:
            for path in local.folders():
                if not self._is_stored(path, stored):
                    _log.warning("the checkpoint %s is dropped: epoch %s is over and has not stored it", path, last)
                    local.drop(path)
        try:
            write_file(file, str(self._epoch).encode())
        except OSError as error:
            raise explain(error, str(file)) from error

    def _is_stored(self, path: Path, stored: list[Committed]) -> bool:
        """A local manifest names the sha256 of its files: the same manifest, the same checkpoint."""
        if not (path / MANIFEST).exists():
            return False
        sha256 = sha256_of(path / MANIFEST)
        for one in stored:
            if one.step == _step_of(path):
                try:
                    files = self._checkpoints.manifest(one.step, one.epoch)["files"]
                except DamagedError:
                    return True  # it was: this is the copy that is left
                if files.get(MANIFEST, {}).get("sha256") == sha256:
                    return True
        return False

    def _beat(self) -> None:
        told = curve = time.monotonic() - METRICS_EVERY_S
        reached = True
        while not self._over.wait(TICK_S):
            try:
                self.ask()
                now = time.monotonic()
                if self._begun and now - told >= PROGRESS_EVERY_S:
                    told = now
                    self._tell()
                if self._begun and now - curve >= METRICS_EVERY_S:
                    curve = now
                    self._tell_curve()
                reached = True
            except StoreError as error:
                if reached:
                    _log.warning("the training goes on without its store: %s", error)
                reached = False
            except BaseException as error:
                self._failure = error  # FencedError, or nobody would watch the fence any more
                return

    def _end_pulse(self) -> None:
        self._over.set()
        self._pulse.join()

    def _say_last(self, stopped: str) -> None:
        self._end_pulse()  # or it might say something older afterwards
        self._said |= {"state": _ENDS[stopped], "finished": stopped == "finished"}
        self._tell_curve()  # first: whoever reads that it is finished finds the whole curve
        self._tell()

    def _tell(self) -> None:
        said, now = dict(self._said), time.monotonic()
        if said != self._told or now - self._told_at >= ALIVE_EVERY_S:
            self._store.put(f"progress/{self._epoch}", to_body(said))
            self._told, self._told_at = said, now

    def _tell_curve(self) -> None:
        file = self._folder / METRICS
        data = file.read_bytes() if file.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if whole and len(whole) != self._told_bytes:
            self._store.put(f"metrics/{self._epoch}.jsonl", whole)
            self._told_bytes = len(whole)

    def _settle(self) -> None:
        """Until the store's clock is past the last commit, so that no fence can carry the same time."""
        committed = [*self._checkpoints.counting(), *self._drafters.counting()]
        mine = [one.at for one in committed if one.epoch == self._epoch]
        end = time.monotonic() + SETTLE_S
        while mine and self._store.server_time() <= max(mine) and time.monotonic() < end:
            time.sleep(0.1)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))
