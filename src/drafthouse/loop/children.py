"""Steps of the loop as processes of their own: started side by side, watched, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from drafthouse.errors import DrafthouseError

# For every `drafthouse` process: libgomp's waiting threads must sleep instead of spin, or a busy machine makes a
# step many times slower; and libraries keep their own bars and warnings to themselves.
QUIET = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
# Two processes of one thread do nearly twice the work of one process with two.
ENVIRONMENT = {**QUIET, "OMP_NUM_THREADS": "1"}
POLL_S = 0.3
# Set for children: their standard input is a pipe that nobody writes to and that closes when the parent ends.
_PIPED = "DRAFTHOUSE_PARENT_ON_STDIN"


class ChildError(DrafthouseError):
    """A step that ran as a process of its own failed."""


class Child:
    """One `drafthouse` verb in a process; its output goes to a log file.

    Args:
        name: for messages and for the log file.
        verb: words after `drafthouse`.
        logs: folder of the log file.
    """

    def __init__(self, name: str, verb: Sequence[str], logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.name, self.log, self.killed = name, logs / f"{name}.log", False
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "drafthouse.cli", *verb],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.PIPE,
                env={**os.environ, **ENVIRONMENT, _PIPED: "1"},
            )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL: the process gets no chance to tidy up, as when its node dies."""
        self.killed = True
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def freeze(self) -> None:
        """SIGSTOP; returns when none of its threads runs any more, or when it has ended."""
        self.process.send_signal(signal.SIGSTOP)
        if self.running:
            # WNOWAIT: an end stays for `Popen` to see.
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def check(self) -> None:
        """Raise ChildError if it ended by itself with an error."""
        code = self.process.poll()
        if code in (None, 0) or self.killed:
            return
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = lines[-1].removeprefix("error: ") if lines else f"exit code {code}"
        raise ChildError(f"{self.name} failed ({last})", where=str(self.log), fix="see the log")


class Children:
    """Processes that live no longer than this `with` block, and the memory that they take together."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: list[Child] = []
        self.peak_bytes = 0

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            if child.running:
                child.kill()
            if child.process.stdin is not None:
                child.process.stdin.close()

    def start(self, name: str, *verb: str) -> Child:
        child = Child(name, verb, self._logs)
        self._children.append(child)
        return child

    def wait(self, watch: Callable[[], None], poll_s: float | None = None) -> None:
        """Until all have ended, calling `watch` every `poll_s` seconds (None: about three times a second).

        Raises:
            ChildError: one failed; the others are ended.
        """
        while any(child.running for child in self._children):
            for child in self._children:
                child.check()
            self.peak_bytes = max(self.peak_bytes, self._memory())
            watch()
            time.sleep(POLL_S if poll_s is None else poll_s)
        for child in self._children:
            child.check()
        watch()

    def _memory(self) -> int:
        pids = [os.getpid(), *(child.process.pid for child in self._children if child.running)]
        return sum(map(proportional_bytes, pids))


def end_with_parent() -> None:
    """In a process that `Child` started: end it when its parent has ended, however that happened.

    A killed parent cannot end its children, and two trainings of one drafter would write the same files. The
    kernel closes the parent's end of the pipe in every case, on every system. Elsewhere this does nothing.
    """
    if os.environ.pop(_PIPED, None) is not None:
        threading.Thread(target=_end_at_close, name="parent", daemon=True).start()


def _end_at_close() -> None:
    # Not sys.stdin: a thread that holds its lock makes the interpreter abort when it shuts down.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # an extraction worker gives back its leases then


def proportional_bytes(pid: int) -> int:
    """Memory of a process with shared pages split among their users (Linux PSS); 0 where that is unknown."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0
