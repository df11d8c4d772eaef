"""The host as planners and appliers see it: files below a root, and commands.

A `World` on another root reads a captured tree; a `ContainerWorld` reads and acts inside a Proxmox container
through `pct`. Nothing else in this package opens a file or starts a process.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shlex
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .steps import ApplyError


@dataclass(frozen=True)
class Result:
    """Outcome of a command; `rc` 127 when the program does not exist, 124 when it ran past its limit."""

    rc: int
    out: str
    err: str

    @property
    def ok(self) -> bool:
        return self.rc == 0

    def tail(self, lines: int = 12) -> str:
        """The end of what the command said, for an error message."""
        return "\n".join((self.out + self.err).strip().splitlines()[-lines:])


@dataclass(frozen=True)
class Ownership:
    """Permissions of a file, and the numbers of its user and group."""

    mode: int
    owner: tuple[int, int]


class World:
    """Files below `root` and commands of this machine.

    Args:
        root: `/` on a host; the folder of a captured tree in tests. Paths given to the methods are absolute paths
            of the host and are resolved below the root.
        environment: variables for commands, on top of the caller's own; the locale is always C.
    """

    def __init__(self, root: str = "/", environment: dict[str, str] | None = None) -> None:
        self.root = root.rstrip("/")
        self.environment = {**os.environ, **(environment or {}), "LC_ALL": "C"}

    def path(self, path: str) -> str:
        return f"{self.root}{path}"

    # -- reading ---------------------------------------------------------------------------------------------------

    def read(self, path: str) -> str | None:
        """Text of a file, None where there is none or it cannot be read as a file."""
        try:
            with open(self.path(path), encoding="utf-8", errors="replace") as file:
                return file.read()
        except (OSError, ValueError):
            return None

    def exists(self, path: str) -> bool:
        return os.path.lexists(self.path(path))

    def names(self, path: str) -> list[str]:
        """Names in a folder, sorted; empty where there is no such folder."""
        try:
            return sorted(os.listdir(self.path(path)))
        except OSError:
            return []

    def glob(self, pattern: str) -> list[str]:
        """Host paths that match, sorted."""
        found = glob.glob(self.path(pattern))
        return sorted(name[len(self.root) :] for name in found)

    def link(self, path: str) -> str | None:
        """Target of a symbolic link as written, None where there is no link."""
        try:
            return os.readlink(self.path(path))
        except OSError:
            return None

    def device(self, path: str, follow: bool = False) -> tuple[str, int, int] | None:
        """(`char`|`block`|`file`|`dir`|`other`, major, minor) of what stands at the path itself, or None.

        With `follow`, of what a link there leads to; an open file below /proc tells its numbers so, whatever name the
        container of its process has for it.
        """
        try:
            status = os.stat(self.path(path), follow_symlinks=follow)
        except OSError:
            return None
        mode = status.st_mode
        for kind, test in (("char", stat.S_ISCHR), ("block", stat.S_ISBLK)):
            if test(mode):
                return kind, os.major(status.st_rdev), os.minor(status.st_rdev)
        kind = "file" if stat.S_ISREG(mode) else "dir" if stat.S_ISDIR(mode) else "other"
        return kind, 0, 0

    def ownership(self, path: str) -> Ownership | None:
        """Whose a file is and who may use it, a link followed; None where there is none."""
        try:
            status = os.stat(self.path(path))
        except OSError:
            return None
        return Ownership(stat.S_IMODE(status.st_mode), (status.st_uid, status.st_gid))

    def end(self, path: str) -> str:
        """Where a link, or a chain of them, ends; a path that is no link ends at itself, a broken link at ``."""
        for _ in range(8):
            target = self.link(path)
            if target is None:
                return path if self.exists(path) else ""
            path = target if target.startswith("/") else f"{path.rsplit('/', 1)[0]}/{target}"
        return ""

    def ahead(
        self,
        commands: Sequence[Sequence[str]] = (),
        files: Sequence[str] = (),
        folders: Sequence[str] = (),
        places: Sequence[str] = (),
        links: Sequence[str] = (),
    ) -> World:
        """This world with the answers to these questions known, for one that is slow to ask; here it is itself.

        Args:
            commands: for `run`; they only look.
            files: for `read`.
            folders: for `names`.
            places: for `exists`.
            links: for `end`.
        """
        return self

    # -- acting ----------------------------------------------------------------------------------------------------

    def _kept(self, path: str, mode: int | None, owner: tuple[int, int] | None) -> tuple[int, tuple[int, int] | None]:
        """Permissions and owner that a file gets: those given, or else those that it has; 0644 for a new one."""
        found = self.ownership(path)
        if found is None:
            return 0o644 if mode is None else mode, owner
        return found.mode if mode is None else mode, owner or found.owner

    def write(self, path: str, text: str, mode: int | None = None, owner: tuple[int, int] | None = None) -> None:
        """Replace a configuration file as a whole: a reader sees the old text or the new one.

        Args:
            mode: its permissions; None keeps those of a file that is there and gives a new one 0644.
            owner: its user and group; None keeps those of a file that is there.
        """
        target = self.path(path)
        mode, owner = self._kept(path, mode, owner)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".drafthouse-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            # The owner first: a change of owner takes set-id bits away.
            if owner:
                os.chown(temporary, *owner)
            os.chmod(temporary, mode)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise

    def poke(self, path: str, text: str) -> None:
        """Write to a kernel attribute (sysfs, procfs), which cannot be replaced by a rename."""
        with open(self.path(path), "w", encoding="utf-8") as file:
            file.write(text)

    def poke_within(self, path: str, text: str, timeout_s: float) -> None:
        """`poke` by a child process, for attributes whose write can block in the kernel (`unbind` of a device in use).

        A child that blocks cannot even be killed, so it is left behind: it shares no pipe with this process and
        nobody waits for it.

        Raises:
            OSError: the kernel refused the text.
            ApplyError: the write did not return within `timeout_s` seconds.
        """
        with tempfile.TemporaryFile() as said:
            child = subprocess.Popen(
                ["/bin/sh", "-c", 'printf %s "$1" > "$2"', "poke", text, self.path(path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,
            )
            if not self.wait(lambda: child.poll() is not None, timeout_s, 0.005):
                child.kill()
                raise ApplyError(f"writing {text.strip()!r} to {path} did not return within {timeout_s:g} s")
            if child.returncode:
                said.seek(0)
                raise OSError(f"{path} refuses {text.strip()!r}: {said.read().decode(errors='replace').strip()}")

    def remove(self, path: str) -> None:
        """Remove a file; an absent one is fine."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(path))

    def run(self, argv: Sequence[str], timeout_s: float = 60.0, stdin: str | None = None) -> Result:
        """Run a command to its end, or stop it after `timeout_s` seconds; never through a shell."""
        try:
            done = subprocess.run(
                list(argv),
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=timeout_s,
                env=self.environment,
                check=False,
            )
        except FileNotFoundError:
            return Result(127, "", f"{argv[0]}: command not found")
        except subprocess.TimeoutExpired:
            return Result(124, "", f"{shlex.join(argv)}: no answer within {timeout_s:g} s")
        return Result(done.returncode, done.stdout, done.stderr)

    def must(self, argv: Sequence[str], timeout_s: float = 60.0, stdin: str | None = None) -> Result:
        """`run`, with a failed command as an error that quotes it.

        Raises:
            ApplyError: the command failed, with the end of what it said.
        """
        result = self.run(argv, timeout_s, stdin)
        if not result.ok:
            raise ApplyError(f"`{shlex.join(argv)}` ended with {result.rc}: {result.tail()}")
        return result

    def wait(self, holds: Callable[[], bool], timeout_s: float, interval_s: float = 0.05) -> bool:
        """Poll until `holds()`; False after `timeout_s` seconds. Waits here are bounded, always."""
        end = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() >= end:
                return False
            time.sleep(interval_s)
        return True


#: Commands that answer for a path inside a container: its text, its names, whether anything stands there, its end.
_FILE, _FOLDER, _PLACE, _LINK = ("cat",), ("ls", "-1A"), ("stat", "-c", "%F"), ("readlink", "-e")
#: Asks one question after the other and sets their answers apart by NUL: output, status, complaints.
ASK = """exec 3>&1
ask() { said=$("$@" 2>&1 >&3 3>&- </dev/null); printf '\\0%s\\0%s\\0' $? "$said"; }
"""


def asking(questions: Sequence[Sequence[str]]) -> str:
    """A shell script that asks these commands, each for itself."""
    return ASK + "".join(f"ask {shlex.join(question)}\n" for question in questions)


def answers_of(questions: Sequence[Sequence[str]], said: str) -> dict[tuple[str, ...], Result]:
    """What the script of `asking` printed, by question; those that it did not come to are left out."""
    fields = said.split("\0")
    answers = {}
    for index, question in enumerate(questions[: len(fields) // 3]):
        out, rc, err = fields[3 * index : 3 * index + 3]
        if not rc.isdigit():  # an answer with a NUL in it; from here on they cannot be told apart
            break
        missing = rc == "127" and "not found" in err
        answers[tuple(question)] = Result(int(rc), out, f"{question[0]}: command not found" if missing else err)
    return answers


class ContainerWorld(World):
    """Inside a running Proxmox container, through `pct exec` and `pct push` of its host.

    Args:
        host: the host's own world.
        vmid: the container's number.
    """

    def __init__(self, host: World, vmid: int) -> None:
        super().__init__(environment=None)
        self.host = host
        self.vmid = vmid

    def run(self, argv: Sequence[str], timeout_s: float = 60.0, stdin: str | None = None) -> Result:
        return self.host.run(["pct", "exec", str(self.vmid), "--", *argv], timeout_s, stdin)

    def ahead(
        self,
        commands: Sequence[Sequence[str]] = (),
        files: Sequence[str] = (),
        folders: Sequence[str] = (),
        places: Sequence[str] = (),
        links: Sequence[str] = (),
    ) -> World:
        """One `pct exec` for all: a look costs it once instead of twenty times, which are seconds on a real host."""
        questions = [tuple(argv) for argv in commands]
        for form, paths in ((_FILE, files), (_FOLDER, folders), (_PLACE, places), (_LINK, links)):
            questions += [(*form, path) for path in paths]
        answers = answers_of(questions, self.run(["sh", "-c", asking(questions)], 180).out)
        return AnsweredWorld(self.host, self.vmid, answers)

    def read(self, path: str) -> str | None:
        result = self.run([*_FILE, path])
        return result.out if result.ok else None

    def exists(self, path: str) -> bool:
        return self.run([*_PLACE, path]).ok

    def names(self, path: str) -> list[str]:
        result = self.run([*_FOLDER, path])
        return sorted(result.out.splitlines()) if result.ok else []

    def end(self, path: str) -> str:
        result = self.run([*_LINK, path])
        return result.out.rstrip("\n") if result.ok else ""

    def glob(self, pattern: str) -> list[str]:
        # A shell expands the pattern; it comes from this package, never from the inventory.
        result = self.run(["sh", "-c", f"ls -1d {pattern} 2>/dev/null"])
        return sorted(result.out.splitlines())

    def link(self, path: str) -> str | None:
        result = self.run(["readlink", path])
        return result.out.rstrip("\n") if result.ok else None

    def device(self, path: str, follow: bool = False) -> tuple[str, int, int] | None:
        result = self.run(["stat", *(["-L"] if follow else []), "-c", "%F|%t|%T", path])
        if not result.ok:
            return None
        name, major, minor = result.out.strip().split("|")
        kinds = {"character special file": "char", "block special file": "block", "directory": "dir"}
        kind = kinds.get(name, "file" if name.startswith("regular") else "other")
        return kind, int(major or "0", 16), int(minor or "0", 16)

    def ownership(self, path: str) -> Ownership | None:
        result = self.run(["stat", "-L", "-c", "%a|%u|%g", path])
        if not result.ok:
            return None
        mode, user, group = result.out.strip().split("|")
        return Ownership(int(mode, 8), (int(user), int(group)))

    def write(self, path: str, text: str, mode: int | None = None, owner: tuple[int, int] | None = None) -> None:
        mode, owner = self._kept(path, mode, owner)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="drafthouse-") as file:
            file.write(text)
            file.flush()
            self.must(["mkdir", "-p", os.path.dirname(path)])
            self.push(file.name, path, mode, owner)

    def push(self, source: str, path: str, mode: int = 0o644, owner: tuple[int, int] | None = None) -> None:
        """Copy a file of the host into the container; `owner` as the container counts, its root when left out.

        Raises:
            ApplyError: `pct push` failed.
        """
        whose = ["--user", str(owner[0]), "--group", str(owner[1])] if owner and any(owner) else []
        argv = ["pct", "push", str(self.vmid), source, path, "--perms", f"{mode:04o}", *whose]
        self.host.must(argv, timeout_s=600)

    def poke(self, path: str, text: str) -> None:
        raise ApplyError(f"container {self.vmid}: kernel attributes such as {path} belong to the host")

    def remove(self, path: str) -> None:
        self.must(["rm", "-f", path])


class AnsweredWorld(ContainerWorld):
    """A container of which some answers are known; what was not asked ahead is asked as ever. Only for looking.

    Args:
        answers: command -> its outcome.
    """

    def __init__(self, host: World, vmid: int, answers: Mapping[tuple[str, ...], Result]) -> None:
        super().__init__(host, vmid)
        self.answers = answers

    def run(self, argv: Sequence[str], timeout_s: float = 60.0, stdin: str | None = None) -> Result:
        return self.answers.get(tuple(argv)) or super().run(argv, timeout_s, stdin)
