"""Looks after units that run as processes of the node: starts, restarts, stops them, keeps their logs.

Standard library of Python 3.9 only: this file is written to the node and run there. Each call prints one JSON value
(`logs` prints lines), or one sentence on stderr with exit status 3 (`REFUSED`).

    supervisor.py start ROOT UNIT < request.json     stop ROOT UNIT GRACE_S    status ROOT UNIT    units ROOT
    supervisor.py logs ROOT UNIT LINES FOLLOW        exec ROOT UNIT WORD...    remove ROOT UNIT
    supervisor.py prepare ROOT UNIT < request.json   only the folders and files, for a container

Two processes stand over a unit, so that kill -9 of either loses nothing: `keep` (systemd itself where it is pid 1)
starts `run` again, `run` starts the command. Both hold one lock (flock) on the unit: a second instance cannot be.
Processes are found by descent, not by process group: `run` and `keep` are child subreapers (prctl(2)), so that a
process that called setsid or lost its parent is still a descendant. If both are killed at once, the unit's folder in
the environment of its processes (proc(5)) says whose they are; only a process that has also emptied its environment is
then found by nobody (under systemd by its control group).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Iterator, NoReturn  # noqa: UP035 - Python 3.9

REFUSED = 3
FENCED, FENCED_FILE = 76, "fenced"
DEFECT = 70  # sysexits.h: EX_SOFTWARE
MARK = "DRAFTHOUSE_UNIT"
LOG_BYTES, LOG_FILES = 10 * 2**20, 3
CHUNK, PIPE_BYTES = 2**16, 2**20  # pipe(7): 64 KiB, at most 1 MiB (pipe-max-size) without privileges
FIRST_PAUSE_S, LONGEST_PAUSE_S, SETTLED_S = 0.5, 30.0, 10.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
INHERITED = ("HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SHELL", "TZ", "USER")
_libc = ctypes.CDLL(None, use_errno=True)


class RefusalError(Exception):
    """One sentence for the operator."""


class Unit:
    """A unit's folder: `request.json` (no secrets), `environment.json` (mode 0600), `status.json`, `log`, `lock`,
    `stop.json` once a stop was asked for, `fenced` once a process of it has found that its life is over."""

    def __init__(self, root: str, name: str) -> None:
        self.name, self.root = name, Path(root)
        self.folder = self.root / "units" / name

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the unit; empty when it is not there or was torn by a crash."""
        try:
            found = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, name: str, value: dict[str, Any]) -> None:
        write_file(self.folder / name, json.dumps(value))

    def forget(self, *names: str) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                (self.folder / name).unlink()

    def lock(self, how: int) -> int | None:
        """A descriptor that holds the unit's lock; None while somebody else does."""
        if not self.folder.is_dir():
            return None
        held = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(held, how | fcntl.LOCK_NB)
        except OSError:
            os.close(held)
            return None
        return held

    def fenced(self) -> bool:
        """Whether a process of the unit left word that the job was moved elsewhere."""
        return (self.folder / FENCED_FILE).exists()

    def supervised(self) -> bool:
        if not (self.folder / "lock").exists():
            return False
        held = self.lock(fcntl.LOCK_SH)
        if held is not None:
            os.close(held)
        return held is None

    def strays(self) -> set[int]:
        """Processes that carry the unit's folder in their environment."""
        wanted = f"{MARK}={self.folder}".encode()
        found = set()
        for pid in processes():
            with contextlib.suppress(OSError):
                if wanted in (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0"):
                    found.add(pid)
        return found - {os.getpid()}


def processes() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def stat_of(pid: int) -> list[str]:
    """Fields of proc(5) stat from the state on: [state, ppid, ...]; empty when the process is gone."""
    try:
        text = (Path("/proc") / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def alive(pid: int) -> bool:
    return stat_of(pid)[:1] not in ([], ["Z"], ["X"])


def descendants(ancestor: int) -> set[int]:
    """Children of `ancestor`, their children and so on; zombies included."""
    children: dict[int, list[int]] = {}
    for pid in processes():
        fields = stat_of(pid)
        if fields:
            children.setdefault(int(fields[1]), []).append(pid)
    found: set[int] = set()
    new = [ancestor]
    while new:
        new = [child for parent in new for child in children.get(parent, []) if child not in found]
        found.update(new)
    return found


def kill_until_gone(find: Callable[[], set[int]], seconds: float = 10.0) -> set[int]:
    """SIGKILL whatever `find` finds, again and again: a process may fork while it is looked for. Returns survivors."""
    end = time.monotonic() + seconds
    while True:
        reap()
        left = {pid for pid in find() if alive(pid)}
        if not left or time.monotonic() > end:
            return left
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def reap() -> dict[int, int]:
    """Collect children that have ended: {pid: exit status, 128 + signal}."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    return ended


def write_file(path: Path, text: str) -> None:
    """Write by a new name, mode 0600: a reader sees the old or the new content, nobody else sees either."""
    descriptor, new = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(new).rename(path)
    except BaseException:
        Path(new).unlink()
        raise


class Log:
    """The log of a unit: at most LOG_FILES files of LOG_BYTES. A full disk loses lines, never the unit."""

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._size, self._lost = path, -1, 0, 0

    def write(self, data: bytes) -> None:
        try:
            if self._file >= 0 and self._size + len(data) > LOG_BYTES:
                self._rotate()
            if self._file < 0:
                self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
                self._size = os.fstat(self._file).st_size
            if self._lost:
                note = f"[drafthouse: {self._lost} bytes of this log were lost, the disk was full]\n".encode()
                self._size += os.write(self._file, note)
                self._lost = 0
            written = os.write(self._file, data)
            self._size += written
            self._lost += len(data) - written
        except OSError:
            self._lost += len(data)

    def note(self, sentence: str) -> None:
        self.write(f"[drafthouse: {sentence}]\n".encode())

    def _rotate(self) -> None:
        os.close(self._file)
        self._file = -1
        for number in range(LOG_FILES - 1, 0, -1):
            older = self._path.with_name(f"log.{number}")
            newer = self._path.with_name(f"log.{number - 1}") if number > 1 else self._path
            if newer.exists():
                newer.rename(older)


class Supervisor:
    """`run`: one life of a unit, restarts included."""

    def __init__(self, unit: Unit) -> None:
        self.unit, self.request = unit, unit.read("request.json")
        self.environment = unit.read("environment.json")
        self.log = Log(unit.folder / "log")
        before = unit.read("status.json")
        self.restarts = int(before.get("restarts", 0))
        self.child: int | None = None
        # A status from before means that an earlier supervisor of this life was killed, and the command with it.
        ended = before.get("state") == "exited"
        self.exit: int | None = before["exit"] if ended else self._verdict(137) if before else None
        self.output: int | None = None
        self.stopping, self.told, self.kill_at = False, False, 0.0
        self.how = "term"
        self.selector = selectors.DefaultSelector()
        self.wakeup, writer = os.pipe()
        for end in (self.wakeup, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.selector.register(self.wakeup, selectors.EVENT_READ)

    def _stop(self, *_: Any) -> None:
        self.stopping = True

    def run(self) -> None:
        self.stopping = self.stopping or (self.unit.folder / "stop.json").exists()
        pause = FIRST_PAUSE_S
        while not self.stopping and (self.exit is None or self._again(self.exit)):
            if self.exit is not None:
                self._status("restarting")
                if not self._wait(pause):
                    break
                pause = min(2 * pause, LONGEST_PAUSE_S)
            began = time.monotonic()
            self.exit = self._life()
            if time.monotonic() - began > SETTLED_S:
                pause = FIRST_PAUSE_S
        self._status("exited")
        # Nobody needs the secrets any more.
        self.unit.forget("environment.json")

    def _again(self, exit: int) -> bool:
        """Whether the command is started again; counts it."""
        policy, tries_left = self.request["restart"], self.restarts < self.request["retries"]
        wanted = policy == "always" or (policy == "on-failure" and exit != 0 and tries_left)
        if exit == FENCED or not wanted:
            return False
        self.restarts += 1
        return True

    def _life(self) -> int:
        """Start the command once and return its exit status when none of its processes is left."""
        reader, writer = os.pipe()
        try:
            # Popen says what kept the program from starting, which fork and exec alone would not.
            process = subprocess.Popen(
                self.request["argv"],
                cwd=self.request["workdir"],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            os.close(reader)
            os.close(writer)
            self.log.note(f"{self.request['argv'][0]} cannot be started: {error}")
            return 127 if isinstance(error, FileNotFoundError) else 126
        os.close(writer)
        os.set_blocking(reader, False)
        self.selector.register(reader, selectors.EVENT_READ)
        self.output = reader
        self.child, self.told = process.pid, False
        self._status("running")
        status = None
        while status is None:
            self._forward()
            self._turn()
            status = reap().get(process.pid)
        process.returncode = status
        self.child = None
        # As when a container ends: what the command left behind ends with it.
        survivors = kill_until_gone(lambda: descendants(os.getpid()))
        if survivors:
            self.log.note(f"these processes do not die: {sorted(survivors)}")
        self._copy()
        self._close_output()
        return self._verdict(status)

    def _verdict(self, status: int) -> int:
        """The exit status of the command, or that of the process in it which was fenced off: a launcher that stands
        between (torchrun) ends with one of its own."""
        return FENCED if self.unit.fenced() else status

    def _forward(self) -> None:
        """SIGTERM to the command once a stop was asked for; SIGKILL to all of it when the grace is over."""
        if not self.stopping or self.child is None:
            return
        if not self.told:
            grace = float(self.unit.read("stop.json").get("grace_s", self.request["grace_s"]))
            self.told, self.kill_at = True, time.monotonic() + grace
            with contextlib.suppress(OSError):
                os.kill(self.child, signal.SIGTERM)
        elif time.monotonic() >= self.kill_at:
            self.how = "kill"
            for pid in descendants(os.getpid()):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self.kill_at = time.monotonic() + 0.1

    def _turn(self) -> None:
        """Sleep until there is output, a signal or the end of the grace."""
        timeout = max(self.kill_at - time.monotonic(), 0.0) if self.told else None
        for key, _ in self.selector.select(timeout):
            if key.fd == self.wakeup:
                self._drain_wakeups()
            elif not self._copy():
                self._close_output()  # by the command itself: it would be ready for ever

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wakeup, 4096):
                pass

    def _copy(self) -> bool:
        """Move output into the log; False at its end. Not more than a pipe can hold: who never stops writing must not
        keep us from the rest."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(PIPE_BYTES // CHUNK):
                if self.output is None:
                    break
                data = os.read(self.output, CHUNK)
                if not data:
                    return False
                self.log.write(data)
        return True

    def _close_output(self) -> None:
        if self.output is not None:
            self.selector.unregister(self.output)
            os.close(self.output)
            self.output = None

    def _wait(self, seconds: float) -> bool:
        """Sleep; False when a stop was asked for."""
        end = time.monotonic() + seconds
        while not self.stopping and time.monotonic() < end:
            if self.selector.select(end - time.monotonic()):
                self._drain_wakeups()
            reap()
        return not self.stopping

    def _status(self, state: str) -> None:
        value = {"state": state, "pid": self.child, "exit": self.exit, "restarts": self.restarts, "how": self.how}
        since = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        with contextlib.suppress(OSError):  # a full disk: the unit goes on
            self.unit.write("status.json", {**value, "since": since, "supervisor": os.getpid()})


def die_with_parent() -> None:
    """In the command's process, before exec: it must not outlive a killed supervisor."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("0", encoding="ascii")


def stand_over(unit: Unit) -> None:
    """Of `keep` and `run`: adopt orphans, outlive the command when memory runs out, end what an earlier life left."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("-500", encoding="ascii")
    kill_until_gone(unit.strays)


def own(unit: Unit) -> None:
    """Take the unit's lock for as long as this process or a child of it lives."""
    end = time.monotonic() + 2.0
    held = unit.lock(fcntl.LOCK_EX)
    while held is None and time.monotonic() < end:  # somebody may be looking whether it is held
        time.sleep(0.02)
        held = unit.lock(fcntl.LOCK_EX)
    if held is None:
        raise RefusalError(f"{unit.name} is looked after by another process already")


def look_after(unit: Unit) -> None:
    """Supervise until the unit has ended. A defect of this program ends it too, and is told: nothing is started again
    and again, and nothing looks as if it ran."""
    try:
        Supervisor(unit).run()
    except Exception:
        kill_until_gone(lambda: descendants(os.getpid()))
        Log(unit.folder / "log").note(traceback.format_exc())
        ended = {"state": "exited", "pid": None, "exit": DEFECT, "restarts": 0, "how": "kill"}
        with contextlib.suppress(OSError):
            unit.write("status.json", ended)
        unit.forget("environment.json")


def run(unit: Unit) -> None:
    """Under systemd, which restarts this process when it is killed."""
    own(unit)
    stand_over(unit)
    look_after(unit)


def keep(unit: Unit) -> None:
    """Without systemd: look after the supervisor itself."""
    own(unit)
    stand_over(unit)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its supervisor, which is told by `stop`
    while True:
        child = os.fork()
        if child == 0:
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            look_after(unit)
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            return
        kill_until_gone(lambda: descendants(os.getpid()))
        time.sleep(FIRST_PAUSE_S)


def start(unit: Unit) -> dict[str, Any]:
    request = json.load(sys.stdin)
    unit.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (unit.folder / "starting").open("w") as one_at_a_time:
        fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
        if unit.supervised():
            return status(unit)
        kill_until_gone(unit.strays)  # of an earlier life that nobody looks after; they may have the port
        check_ports(request["ports"])
        job = write_job_files(unit.root, request)
        environment = environment_of(unit, request)
        request["workdir"] = request["workdir"] or str(job)
        check_program(request, environment)
        unit.forget("status.json", "stop.json", FENCED_FILE)
        wanted = ("job", "epoch", "argv", "workdir", "restart", "retries", "grace_s", "labels")
        try:
            unit.write("environment.json", environment)
            unit.write("request.json", {name: request[name] for name in wanted})
            launch(unit, request["grace_s"])
            await_first_status(unit)
        except (OSError, RefusalError):
            if not unit.supervised():
                unit.forget("environment.json", "request.json")
            raise
        return status(unit)


def await_first_status(unit: Unit, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not unit.read("status.json"):
        if time.monotonic() > end:
            raise RefusalError(f"{unit.name} did not come up within {seconds:g} s")
        time.sleep(0.02)


def prepare(unit: Unit) -> dict[str, Any]:
    """Lay out what a container is given: the job's folder with its files, and `box`, a folder of the unit's own.
    Everything in them belongs to the container's user."""
    request = json.load(sys.stdin)
    check_ports(request["ports"])
    job = write_job_files(unit.root, request)
    box = unit.folder / "box"
    box.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, text in request["box"].items():
        write_file(box / name, text)
    for path in (box, *(box / name for name in request["box"])):
        os.chown(path, request["owner"], -1)
    return {"job": str(job), "box": str(box)}


def environment_of(unit: Unit, request: dict[str, Any]) -> dict[str, str]:
    """What the command sees: little of the login that started it, then what the job says."""
    names = [name for name in os.environ if name in INHERITED or name.startswith(("LC_", "NVIDIA_", "CUDA_"))]
    environment = {"LANG": "C.UTF-8", **{name: os.environ[name] for name in names}}
    venv = request["venv"]
    if venv:
        if not (Path(venv) / "bin").is_dir():
            raise RefusalError(f"there is no virtual environment in {venv}")
        environment["VIRTUAL_ENV"] = venv
        environment["PATH"] = f"{venv}/bin:{environment.get('PATH', os.defpath)}"
    gpus = request["gpus"]
    devices = [str(index) for index in range(gpus)] if isinstance(gpus, int) else gpus
    # Otherwise CUDA counts the fastest GPU first, and device 0 is another one than nvidia-smi's.
    environment.update(CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_VISIBLE_DEVICES=",".join(devices))
    environment.update(DRAFTHOUSE_JOB=request["job"], DRAFTHOUSE_EPOCH=str(request["epoch"]))
    ours = {MARK: str(unit.folder), "DRAFTHOUSE_FENCED": str(unit.folder / FENCED_FILE)}
    return {**environment, **request["env"], **request["secrets"], **ours}


def check_program(request: dict[str, Any], environment: dict[str, str]) -> None:
    workdir, program = request["workdir"], request["argv"][0]
    if not Path(workdir).is_dir():
        raise RefusalError(f"the work folder {workdir} is not there")
    found = Path(workdir) / program if "/" in program else shutil.which(program, path=environment.get("PATH"))
    if found is None or not os.access(found, os.X_OK) or Path(found).is_dir():
        raise RefusalError(f"there is no program {program} in PATH" if found is None else f"{found} cannot be executed")


def check_ports(ports: list[int]) -> None:
    """A port that is taken is told before anything is written."""
    for port in ports:
        for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            try:
                with socket.socket(family) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    if family == socket.AF_INET6:
                        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    probe.bind((address, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise RefusalError(f"port {port} is taken by another process") from None


def write_job_files(root: Path, request: dict[str, Any]) -> Path:
    """The job's folder with its files; a path that leads out of it (also by a symbolic link) is refused."""
    folder = root / "jobs" / str(request["job"])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    home = folder.resolve()
    owner = request.get("owner")
    for name, text in request["files"].items():
        path = home / name
        if home not in path.resolve().parents:
            raise RefusalError(f"the file {name} would lie outside of the job's folder")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(path, text)
        if owner is not None:
            for each in (path, *(above for above in path.parents if home in above.parents)):
                os.chown(each, owner, -1)
    if owner is not None:
        os.chown(home, owner, -1)
    return folder


def under_systemd() -> bool:
    """sd_booted(3): whether systemd is pid 1."""
    return Path("/run/systemd/system").is_dir() and shutil.which("systemd-run") is not None


def launch(unit: Unit, grace_s: float) -> None:
    """Start the processes that look after the unit, out of reach of this session's end."""
    words = [sys.executable, str(Path(__file__).resolve())]
    place = [str(unit.root), unit.name]
    if not under_systemd():
        nothing = subprocess.DEVNULL
        subprocess.Popen(
            [*words, "keep", *place], stdin=nothing, stdout=nothing, stderr=nothing, cwd="/", start_new_session=True
        )
        return
    properties = {
        "Type": "exec",
        "KillMode": "mixed",  # SIGTERM to the supervisor, which passes it on; SIGKILL to everything
        "TimeoutStopSec": f"{grace_s + 15:.0f}",
        "Restart": "on-failure",  # of the supervisor: of the command it is the supervisor's business
        "RestartSec": "0.5",
        "OOMPolicy": "continue",
        "Description": f"drafthouse unit {unit.name}",
    }
    options = [f"--property={name}={value}" for name, value in properties.items()]
    done = subprocess.run(
        ["systemd-run", "--quiet", "--collect", f"--unit={unit.name}", *options, "--", *words, "run", *place],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if done.returncode:
        raise RefusalError(f"systemd-run refuses {unit.name}: {' '.join(done.stderr.split())}")


def stop(unit: Unit, grace_s: float) -> dict[str, Any]:
    began = time.monotonic()
    # Written before anybody is looked for: a supervisor that was killed, and is started again right now, reads it.
    if unit.folder.is_dir():
        with contextlib.suppress(OSError):  # a full disk: who lives is told by a signal, too
            unit.write("stop.json", {"grace_s": grace_s})
    if not unit.supervised():
        left = bool(unit.strays())
        withdraw(unit, grace_s)
        survivors = kill_until_gone(unit.strays)
        unit.forget("environment.json")
        return stopped("kill" if left else "absent", began, survivors)
    told: set[int] = set()
    end = began + grace_s + 5.0
    while unit.supervised() and time.monotonic() < end:
        supervisor = int(unit.read("status.json").get("supervisor", 0))
        if supervisor not in told and is_supervisor(supervisor, unit):
            told.add(supervisor)
            with contextlib.suppress(ProcessLookupError):
                os.kill(supervisor, signal.SIGTERM)
        time.sleep(0.02)
    last = unit.read("status.json")
    if last.get("state") == "exited" and not unit.supervised():
        unit.forget("environment.json")
        return stopped(str(last.get("how", "kill")), began, set())

    # The supervisor itself hangs, was stopped, or was killed meanwhile.
    def everything() -> set[int]:
        overseers = {pid for pid in processes() if is_supervisor(pid, unit)}
        return unit.strays() | overseers | {pid for each in overseers for pid in descendants(each)}

    kill_until_gone(everything)
    withdraw(unit, grace_s)
    survivors = kill_until_gone(everything)
    unit.forget("environment.json")
    unit.write("status.json", {**unit.read("status.json"), "state": "exited", "exit": 137, "pid": None})
    return stopped("kill", began, survivors)


def withdraw(unit: Unit, grace_s: float) -> None:
    """Let systemd forget the unit: it starts a supervisor that was killed again after half a second, also one whose
    folder is gone by then."""
    if under_systemd():
        words = ["systemctl", "stop", f"{unit.name}.service"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=grace_s + 20, check=False)


def stopped(how: str, began: float, survivors: set[int]) -> dict[str, Any]:
    if survivors:
        raise RefusalError(f"these processes do not die: {sorted(survivors)}")
    return {"how": how, "seconds": round(time.monotonic() - began, 3)}


def is_supervisor(pid: int, unit: Unit) -> bool:
    """Whether `pid` is `keep` or `run` of this unit (a pid alone may have been given to somebody else)."""
    try:
        words = (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return words[2:5] in [[verb, str(unit.root).encode(), unit.name.encode()] for verb in (b"keep", b"run")]


def status(unit: Unit) -> dict[str, Any]:
    """What is known of the unit, as `UnitStatus` says it."""
    if not (unit.folder / "request.json").exists():
        return {"unit": unit.name, "state": "absent"}
    found = unit.read("status.json")
    value = {name: found.get(name) for name in ("exit", "restarts", "since", "pid")}
    value["restarts"] = value["restarts"] or 0
    if unit.supervised():
        return {**value, "unit": unit.name, "state": found.get("state", "restarting")}
    if unit.strays():  # nobody looks after them, but they run
        return {**value, "unit": unit.name, "state": "running"}
    ended = found.get("state") == "exited"
    return {**value, "unit": unit.name, "state": "exited", "pid": None, "exit": found.get("exit") if ended else 137}


def units(root: str) -> list[dict[str, Any]]:
    folders = sorted(Path(root, "units").glob("*/request.json"))
    return [status(Unit(root, path.parent.name)) for path in folders]


def logs(unit: Unit, lines: int, follow: bool) -> None:
    """Print the log from `lines` lines before its end (-1: all); `follow` goes on until the unit has ended."""
    if not unit.folder.is_dir():
        raise RefusalError(f"there is no log of {unit.name}")
    path = unit.folder / "log"
    old = [path.with_name(f"log.{number}") for number in range(LOG_FILES - 1, 0, -1)]
    out = sys.stdout.buffer
    file = None
    while file is None:
        with contextlib.suppress(FileNotFoundError):
            file = path.open("rb")
        if file is None and (not follow or not unit.supervised()):
            return
        if file is None:
            time.sleep(0.2)
    texts = [one.read_bytes() for one in old if one.exists()] + [file.read()]
    out.write(last_lines(b"".join(texts), lines))
    out.flush()
    while follow:
        ended = not unit.supervised()  # asked before reading: what it wrote last must not be missed
        new = file.read()
        rotated = not path.exists() or path.stat().st_ino != os.fstat(file.fileno()).st_ino
        if not new and rotated and path.exists():
            file.close()
            file = path.open("rb")
            continue
        out.write(new)
        out.flush()
        if ended and not new:
            return
        if not new:
            time.sleep(0.2)


def last_lines(text: bytes, lines: int) -> bytes:
    """The last lines of `text`; a carriage return (of a progress bar) does not end one."""
    if lines < 0:
        return text
    start = len(text)
    for _ in range(lines):
        start = text.rfind(b"\n", 0, max(start - 1, 0)) + 1
        if start == 0:
            break
    return text[start:]


def execute(unit: Unit, argv: list[str]) -> NoReturn:
    """Become a command in the unit's environment and folder."""
    environment, request = unit.read("environment.json"), unit.read("request.json")
    if not environment or not request:
        raise RefusalError(f"{unit.name} does not run")
    try:
        os.chdir(request["workdir"])
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        raise RefusalError(f"{argv[0]} cannot be executed: {error.strerror}") from None


def remove(unit: Unit) -> dict[str, Any]:
    if unit.supervised() or unit.strays():
        raise RefusalError(f"{unit.name} still runs")
    if unit.folder.is_dir():
        shutil.rmtree(unit.folder)
    return {"unit": unit.name}


def main(words: list[str]) -> int:
    verb, root, rest = words[0], words[1], words[2:]
    try:
        if verb == "units":
            answer: Any = units(root)
        else:
            answer = one(verb, Unit(root, rest[0]), rest[1:])
    except RefusalError as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        print(f"error: {error.strerror or error}{place}", file=sys.stderr)
        return REFUSED
    if answer is not None:
        print(json.dumps(answer))
    return 0


def one(verb: str, unit: Unit, words: list[str]) -> Any:
    """A verb about one unit."""
    if verb == "start":
        return start(unit)
    if verb == "stop":
        return stop(unit, float(words[0]))
    if verb == "logs":
        return logs(unit, int(words[0]), words[1] == "follow")
    if verb == "exec":
        return execute(unit, words)
    if verb in ("keep", "run"):
        return keep(unit) if verb == "keep" else run(unit)
    return {"prepare": prepare, "status": status, "remove": remove}[verb](unit)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
