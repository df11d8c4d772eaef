"""Bringing a machine double up, asking it questions, taking it down."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.doubles.machine.nvidia import DRIVER, runfile
from tests.patience import until

REPOSITORY = Path(__file__).resolve().parents[3]
ENTER = Path(__file__).with_name("enter")
#: Where the container's root lies below the host's; `pct exec` and Ansible's connection both go there.
CONTAINER_ROOT = "var/lib/lxc/129/rootfs"
NAMESPACES = ("--mount", "--pid", "--uts", "--ipc", "--net", "--fork", "--kill-child", "--propagation", "private")


class MachineError(Exception):
    """The machine did not come up, or does not answer."""


@cache
def why_not() -> str | None:
    """Why this computer cannot hold a machine double, None when it can."""
    if os.geteuid() != 0:
        return "a machine double needs root: overlay mounts and device nodes"
    for program in ("unshare", "nsenter", "chroot", "/usr/bin/python3", "/usr/bin/apt-get", "/usr/bin/dpkg-deb"):
        if not shutil.which(program):
            return f"a machine double is laid over a Debian root, and {program} is missing here"
    with tempfile.TemporaryDirectory() as folder:
        script = (
            f"mount -t tmpfs tmpfs {folder} && mkdir {folder}/a {folder}/b {folder}/c && "
            f"mount -t overlay -o lowerdir=/,upperdir={folder}/a,workdir={folder}/b overlay {folder}/c"
        )
        done = subprocess.run(["unshare", *NAMESPACES, "sh", "-c", script], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"overlay mounts are not allowed here: {done.stderr.strip()}"


@dataclass(frozen=True)
class Machine:
    """A running machine double.

    Attributes:
        folder: what it keeps on this computer: `root` (the mount point; empty when looked at from outside), `pid`,
            `control` (the socket that answers questions), `console` (what process 1 said), `cache` (the driver's
            installer).
    """

    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def pid(self) -> int:
        return int((self.folder / "pid").read_text(encoding="utf-8"))

    def ask(self, do: str, **details: Any) -> Any:
        """Put a question to process 1.

        Raises:
            MachineError: it does not answer, or answers with an error.
        """
        folder = os.open(self.folder, os.O_PATH)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
                line.settimeout(60)
                line.connect(f"/proc/self/fd/{folder}/control")
                line.sendall(json.dumps({"do": do, **details}).encode() + b"\n")
                with line.makefile("r", encoding="utf-8") as answers:
                    answer = json.loads(answers.readline() or '{"error": "no answer"}')
        except OSError as failure:
            raise MachineError(f"the machine in {self.folder} does not answer: {failure}") from failure
        finally:
            os.close(folder)
        if "error" in answer:
            raise MachineError(f"{do}: {answer['error']}")
        return answer["answer"]

    def commands(self, kind: str | None = None) -> list[str]:
        """Commands that its programs were called with, `reader` or `mutator` ones or all, oldest first."""
        return [entry["command"] for entry in self.ask("log") if kind in (None, entry["kind"])]

    def touched(self) -> dict[str, str]:
        """Path -> fingerprint of everything written since boot, by whomever and with whatever."""
        return dict(self.ask("touched"))

    def changes(self) -> dict[str, str]:
        """Path -> fingerprint of everything that is not as it was at boot."""
        return dict(self.ask("changes"))

    def run(self, *argv: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program inside, as an operator logged in on it would."""
        return subprocess.run(
            [*self.command(), *argv], input=stdin, capture_output=True, text=True, check=False, timeout=120
        )

    def command(self) -> list[str]:
        """What stands in front of a command that is to run inside."""
        return [str(ENTER), str(self.root)]

    def down(self) -> None:
        """Stop it; what ran inside is killed and its mounts vanish with the namespace."""
        with contextlib.suppress(OSError, ValueError):
            # A machine that ended long ago may have left its number to somebody else.
            if str(self.folder).encode() in Path(f"/proc/{self.pid}/cmdline").read_bytes():
                os.kill(self.pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def up(folder: Path, host: str, owner: int | None = None, seconds: float = 900.0) -> Machine:
    """Bring up the machine called `host` in `hosts.HOSTS`.

    Args:
        folder: made here; must not exist.
        owner: process with which the machine goes down (this one).
        seconds: it goes down by itself after this long.

    Raises:
        MachineError: it did not come up, with what its process 1 said.
    """
    for place in ("root", f"root/{CONTAINER_ROOT}"):
        # The chroot connection looks for a shell from outside, where only the bare mount points are seen.
        (folder / place / "bin").mkdir(parents=True)
        (folder / place / "bin/sh").symlink_to("/bin/sh")
    cache = folder / "cache"
    cache.mkdir()
    (cache / f"NVIDIA-Linux-x86_64-{DRIVER}.run").write_text(runfile(DRIVER), encoding="utf-8")
    belongs_to = os.pidfd_open(owner or os.getpid())
    try:
        with (folder / "console").open("w", encoding="utf-8") as console:
            process = subprocess.Popen(
                [
                    *("unshare", *NAMESPACES, "--"),
                    *(sys.executable, "-m", f"{__package__}.hold", str(folder), host),
                    *("--owner", str(belongs_to), "--seconds", str(seconds)),
                ],
                pass_fds=[belongs_to],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'ansible/module_utils'}"},
            )
    finally:
        os.close(belongs_to)
    try:
        until((folder / "pid").exists, "its number", unless=lambda: process.poll() is not None and "it has ended")
    except AssertionError as error:
        process.kill()
        said = (folder / "console").read_text(encoding="utf-8")[-2000:]
        shutil.rmtree(folder, ignore_errors=True)
        raise MachineError(f"machine {host} did not come up: {error}: {said}") from error
    return Machine(folder)


@contextlib.contextmanager
def machine(folder: Path, host: str) -> Iterator[Machine]:
    """A machine for the length of a `with` block."""
    running = up(folder, host)
    try:
        yield running
    finally:
        running.down()
