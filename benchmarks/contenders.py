"""Trainers side by side: they start together, and are timed one after the other. The parent of peer_trainers.py."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


class Contender:
    """One trainer as its own process; it warms up at once and waits at the gate of `peer_trainers.Clock`."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.log = folder / f"{name}.log"
        for end in ("ready", "go", "json"):
            (folder / f"{name}.{end}").unlink(missing_ok=True)
        with self.log.open("w") as stream:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).parent / "peer_trainers.py"), name, str(folder)],
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def settled(self) -> bool:
        """At the gate, or over."""
        return self.ended or (self.folder / f"{self.name}.ready").exists()

    def finish(self, until: float) -> dict[str, Any] | None:
        """Open the gate and wait for the end; None when it failed, with the end of its output printed."""
        (self.folder / f"{self.name}.go").touch()
        while not self.ended and time.monotonic() < until:
            time.sleep(0.1)
        if not self.ended:
            print(f"{self.name}: not done in time", flush=True)
        self.kill()
        result = self.folder / f"{self.name}.json"
        if not result.exists():
            print(f"{self.name} FAILED:\n" + self.log.read_text(errors="replace")[-3000:], flush=True)
            return None
        found: dict[str, Any] = json.loads(result.read_text())
        warmed = re.findall(r"warm-up step \d+ at ([\d.]+) s", self.log.read_text(errors="replace"))
        times = found["step_seconds"]
        print(
            f"{self.name}: {[round(t, 3) for t in times]} peak {found['peak_bytes'] / 2**30:.1f} GiB, warm-up steps at "
            f"{', '.join(warmed)} s",
            flush=True,
        )
        return found

    def kill(self) -> None:
        """The process and what it started (its loaders and compilers are of its own session)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def contend(names: Sequence[str], folder: Path, limit: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Start all at once, and time them one after the other on a quiet device, in the order given.

    Compiling and loading take a minute or two each and need no device of their own. One that fails beside the others
    (their states share the device's memory) gets a second go alone.

    Args:
        limit: seconds until all have warmed up; those that have not by then are ended.
    """
    contenders = [Contender(name, folder) for name in names]
    try:
        until = time.monotonic() + limit
        while time.monotonic() < until and not all(one.settled for one in contenders):
            time.sleep(0.2)
        late = [one for one in contenders if not one.settled]
        for one in late:
            print(
                f"{one.name}: not warm after {limit:.0f} s:\n{one.log.read_text(errors='replace')[-6000:]}", flush=True
            )
            one.kill()
        again = []
        for one in contenders:
            if one in late:
                continue
            broke = one.ended
            found = one.finish(time.monotonic() + 60)
            if found is not None:
                yield one.name, found
            elif broke and len(names) > 1:
                again.append(one.name)
    finally:
        for one in contenders:
            one.kill()
    for name in again:
        yield from contend([name], folder, limit)
