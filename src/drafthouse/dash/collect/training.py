"""The training of a drafter: what its copies in a store say (`loop.checkpoints`), or its own folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from drafthouse.dash.collect import fields
from drafthouse.dash.collect.clock import StoreClock
from drafthouse.dash.collect.curve import Curve
from drafthouse.dash.collect.numbers import number, whole
from drafthouse.dash.collect.source import Source
from drafthouse.dash.model import Known, TrainingView
from drafthouse.errors import StoreError
from drafthouse.store import DamagedObjectError, ObjectInfo, Store
from drafthouse.store.body import LARGEST, from_body
from drafthouse.store.keys import number_of
from drafthouse.store.translate import explain

SILENT_S = 90.0
"""A training tells its progress at least every 20 seconds."""
LARGEST_CURVE = 256 << 20
"""Bytes of a metrics file that are fetched at most: half a million rows."""
RESTING = 10
"""One that has ended is looked at this many times less often."""


class TrainingSource(Source):
    """The newest life of a training, as a store has it.

    Args:
        clock: of that store.
    """

    def __init__(self, store: Store, recipe: str, clock: StoreClock, pace_s: float) -> None:
        super().__init__(f"training {recipe} in {store.url}", pace_s)
        self.store, self.recipe, self._clock, self._busy_s = store, recipe, clock, pace_s
        self._objects = store.child(f"drafters/{recipe}")
        self._epoch, self._curve, self._said = -1, Curve(), dict[str, Any]()
        self._told: ObjectInfo | None = None
        self._damaged: dict[str, str] = {}  # what is wrong with which object
        self._drawn: ObjectInfo | None = None
        self._view: TrainingView | None = None

    def view(self) -> TrainingView | None:
        """What is known of it; None before it was ever reached, or while nothing is told there."""
        return None if self._view is None else self._view.model_copy(update={"known": self.known})

    def look(self) -> None:
        told, drawn = self._newest("progress", ""), self._newest("metrics", ".jsonl")
        epochs = [epoch for epoch, _ in (told, drawn)]
        if max(epochs) < 0:
            if self._view is not None:
                raise StoreError("nothing of the training is there any more", where=self._objects.url)
            return
        if max(epochs) != self._epoch:
            self._epoch, self._curve, self._said = max(epochs), Curve(), {}
            self._told = self._drawn = None
            self._damaged = {}
        if told[0] == self._epoch and told[1] != self._told and told[1] is not None:
            self._read("progress", self._read_progress, told[1])
            self._told = told[1]
        if drawn[0] == self._epoch and drawn[1] != self._drawn and drawn[1] is not None:
            self._read("curve", self._read_curve, drawn[1])
            self._drawn = drawn[1]
        times = [info.last_modified for info in (self._told, self._drawn) if info is not None]
        self._clock.seen(max(times))
        age_s = max(0.0, (self._clock.now() - max(times)).total_seconds())
        view = view_of(self.recipe, self.store.url, self._epoch, self._said, self._curve, age_s)
        self._view = view.model_copy(update={"damaged": tuple(self._damaged.values())})
        self.pace_s = self._busy_s * (1 if self._view.state == "training" else RESTING)

    def _read(self, what: str, read: Callable[[ObjectInfo], str | None], info: ObjectInfo) -> None:
        """Read one of the two objects; what is wrong with it says nothing against the other, nor against what it said
        before."""
        try:
            wrong = read(info)
        except DamagedObjectError as error:
            wrong = str(error)
        self._damaged.pop(what, None)
        if wrong is not None:
            self._damaged[what] = wrong

    def _read_progress(self, info: ObjectInfo) -> str | None:
        where = f"{self._objects.url}/{info.key}"
        self._said = from_body(self._objects.get(info.key, most=LARGEST), where)
        names = fields.odd(self._said, _SAID)
        return fields.sentence(where, "what a training says of itself", names) if names else None

    def _read_curve(self, info: ObjectInfo) -> str | None:
        data = self._objects.get(info.key, most=LARGEST_CURVE)
        self._curve.feed(data)
        where = f"{self._objects.url}/{info.key}"
        if not data.endswith(b"\n"):  # whole rows are copied, unlike those of the file as it grows
            return f"{where}: the last row is cut off; see who else writes there"
        return odd_rows(where, self._curve)

    def _newest(self, kind: str, suffix: str) -> tuple[int, ObjectInfo | None]:
        found: list[tuple[int, ObjectInfo]] = []
        for info in self._objects.list(kind):
            number = number_of(info.key.removeprefix(f"{kind}/").removesuffix(suffix))
            if number is not None:
                found.append((number, info))
        return max(found, key=lambda one: one[0], default=(-1, None))


class FolderSource(Source):
    """A training by its metrics.jsonl on this machine.

    Args:
        store: URL that it is shown under.
        steps: of the whole run, where the run file says so.
    """

    def __init__(self, file: Path, recipe: str, store: str, steps: int | None, pace_s: float) -> None:
        super().__init__(f"training {recipe} in {file.parent}", pace_s)
        self.recipe, self._file, self._store, self._steps = recipe, file, store, steps
        self._curve = Curve()
        self._view: TrainingView | None = None

    def view(self) -> TrainingView | None:
        """What is known of it; None before there is a row."""
        return None if self._view is None else self._view.model_copy(update={"known": self.known})

    def look(self) -> None:
        try:
            with self._file.open("rb") as file:
                start = self._curve.resume_at
                file.seek(start)
                if not self._curve.feed(file.read(), start):
                    file.seek(0)
                    self._curve.feed(file.read())
                age_s = max(0.0, time.time() - self._file.stat().st_mtime)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and self._view is None:
                return  # it has not begun
            raise explain(error, str(self._file)) from error
        if self._curve.latest or self._curve.odd[0]:
            said = {"steps": self._steps}
            view = view_of(self.recipe, self._store, 0, said, self._curve, age_s)
            wrong = odd_rows(str(self._file), self._curve)
            self._view = view.model_copy(update={"damaged": () if wrong is None else (wrong,)})


def view_of(recipe: str, store: str, epoch: int, said: Mapping[str, Any], curve: Curve, age_s: float) -> TrainingView:
    """A training out of what it says of itself (`loop.checkpoints`; may be empty) and its curve."""
    latest = curve.latest
    step = max(whole(said.get("step")) or 0, whole(latest.get("step")) or 0)
    steps = whole(said.get("steps"))
    loss = said.get("loss", latest.get("loss")) if step == said.get("step") else latest.get("loss")
    state = str(said.get("state") or ("finished" if steps is not None and step >= steps else "training"))
    if state == "training" and age_s > SILENT_S:
        state = "silent"
    rate = curve.steps_per_s()
    left = None if steps is None else max(0, steps - step)
    return TrainingView(
        recipe=recipe,
        store=store,
        job=_text(said.get("job")),
        node=_text(said.get("node")),
        epoch=epoch,
        known=Known(),
        state=state,
        step=step,
        steps=steps,
        tokens=max(whole(said.get("tokens")) or 0, whole(latest.get("tokens")) or 0),
        loss=number(loss),
        resumed_from=whole(said.get("resumed_from")),
        age_s=age_s,
        eta_s=left / rate if state == "training" and left is not None and rate else None,
        accuracy=curve.accuracy,
        evaluations=tuple(curve.evaluations),
        series=curve.shown(),
        latest=curve.flat(),
    )


def odd_rows(where: str, curve: Curve) -> str | None:
    """Which lines of the curve at `where` are no rows, if there are any."""
    many, first = curve.odd
    if not many:
        return None
    more = f" (and {many - 1:,} more)" if many > 1 else ""
    return f"{where}: line {first:,} is no row of a training{more}; see who else writes there"


_SAID: Mapping[str, fields.Right] = {
    **dict.fromkeys(("state", "node", "job"), fields.text),
    **dict.fromkeys(("step", "steps", "tokens", "resumed_from"), fields.count),
    "loss": fields.figure,
}


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
