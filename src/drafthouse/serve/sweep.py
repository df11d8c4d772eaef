"""Running a sweep: a generator's run a point, acceptance from the engine's own counters, and resumption.

Every point is a file of its own, written when it is complete. A sweep that was interrupted goes on where it stood,
and only under the settings that it began with.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafthouse.config import differences, validate
from drafthouse.errors import ConfigError
from drafthouse.progress import Progress, Silent
from drafthouse.serve import metrics
from drafthouse.serve.endpoint import Endpoint, ServerError
from drafthouse.serve.profile import CanarySpec, Question
from drafthouse.serve.sweep_generators import Generator, environment
from drafthouse.serve.sweep_plan import Load, Place, SweepError, Target
from drafthouse.serve.sweep_result import Measured, Point, Sweep, markdown

SETTINGS, POINT, RESULT, TABLE = "settings.json", "point.json", "sweep.json", "sweep.md"


def run_sweep(
    target: Target,
    load: Load,
    points: Sequence[Place],
    generator: Generator,
    folder: Path,
    progress: Progress | None = None,
) -> Sweep:
    """Measure every point that `folder` does not hold yet, and write `sweep.json` and `sweep.md` into it.

    A point with failed requests is kept and told, and measured again by the next run.

    Args:
        points: results of `sweep_plan.places`.
        folder: made when absent; one folder a point below it, with the generator's log.

    Raises:
        SweepError: no server answers, it serves another model, or the folder holds a sweep with other settings.
    """
    settings: dict[str, Any] = {
        "target": target.model_dump(mode="json"),
        "load": load.model_dump(mode="json"),
        "generator": generator.name,
    }
    # Only what an endpoint needs is used of a canary: its time limit. The question is never asked.
    spec = CanarySpec(questions=(Question(prompt="-", answers=("-",)),), timeout_s=30)
    with Endpoint(target.url, spec) as endpoint:
        _serves(endpoint, target)
        _claim(folder, settings)
        found = []
        with (progress or Silent()).task("sweep", len(points)) as task:
            for place in points:
                below = folder / place.name
                point = _kept(below / POINT)
                if point is None:
                    point = _measure(endpoint, target, load, place, generator, below)
                    if point.complete:
                        _write(below / POINT, point.model_dump(mode="json"))
                found.append(point)
                task.advance(note=f"{place.concurrency} x {place.context}: {point.measured.tokens_per_s:.0f} tokens/s")
    sweep = Sweep(settings=settings, points=tuple(found))
    _write(folder / RESULT, sweep.as_dict())
    _write_text(folder / TABLE, markdown(sweep.points))
    return sweep


def _serves(endpoint: Endpoint, target: Target) -> None:
    try:
        names = endpoint.models()
    except ServerError as fault:
        raise SweepError(
            f"the server cannot be swept ({fault})", where=target.url, fix="start it, or give --url"
        ) from None
    if target.model not in names:
        raise SweepError(
            f"'{target.model}' is not served; the server lists {', '.join(names) or 'nothing'}",
            where=target.url,
            fix="give the name that is served",
        )


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Begin in `folder`, or go on in it."""
    path = folder / SETTINGS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _write(path, settings)
            return
        before = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unwritable(folder, error) from None
    except ValueError:
        raise SweepError("is not the beginning of a sweep", where=str(path), fix="give another --out") from None
    if changed := differences(before, settings):
        raise SweepError(
            f"holds a sweep with other settings ({'; '.join(changed)})",
            where=str(folder),
            fix="give another --out, or the settings that it began with",
        )


def _kept(path: Path) -> Point | None:
    """A point that an earlier run completed."""
    try:
        return validate(Point, json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError, ConfigError):
        return None


def _measure(endpoint: Endpoint, target: Target, load: Load, place: Place, generator: Generator, folder: Path) -> Point:
    # What a broken run left would be read as the result of this one.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = generator.command(target, load, place, folder)
    before = _counters(endpoint)
    start = time.monotonic()
    fault = _run(command, environment(target, os.environ), folder / "log.txt", load.limit_s)
    seconds = time.monotonic() - start
    after = _counters(endpoint)
    asked = place.requests(load)
    try:
        measured = generator.read(folder, asked)
    except SweepError as error:
        measured = Measured(asked=asked, failed=asked, reason=fault or str(error))
    accepted = metrics.acceptance(before, after) if before is not None and after is not None else None
    return Point(
        context=place.context,
        concurrency=place.concurrency,
        measured=measured,
        acceptance=round(accepted.length, 4) if accepted else None,
        acceptance_source=accepted.source if accepted else None,
        seconds=round(seconds, 3),
    )


def _counters(endpoint: Endpoint) -> dict[str, float] | None:
    try:
        return endpoint.metrics()
    except ServerError:
        return None


def _run(command: Sequence[str], env: dict[str, str], log: Path, limit_s: float) -> str | None:
    """Run a generator to its end or its limit; what went wrong, in words.

    In a process group of its own: generators start workers, which must not outlive a point.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(command),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"given up after {limit_s:g} s"
        finally:
            _end(process)
    return None if code == 0 else f"{Path(command[0]).name} ended with exit code {code}; see {log}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the group, also when the user interrupts."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
    finally:
        process.wait()


def _write(path: Path, value: Any) -> None:
    """All of it or nothing: a file that exists is a point that is done."""
    _write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def _write_text(path: Path, text: str) -> None:
    beside = path.with_suffix(".part")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> SweepError:
    reason = (error.strerror or str(error)).lower()
    return SweepError(f"cannot be written ({reason})", where=str(path), fix="free it, or give another --out")
