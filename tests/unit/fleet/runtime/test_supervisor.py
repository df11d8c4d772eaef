"""The program that looks after units, run here as it runs on a node, by the oldest Python that nodes may have."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthouse.fleet.runtime import supervisor
from drafthouse.fleet.runtime.protocol import FENCED, Launch, parse_unit, unit_name
from tests.patience import until

PROGRAM = Path(supervisor.__file__)
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="nodes run Linux")


def oldest_python() -> str:
    """Python 3.9 where this machine has one, else the one that runs the tests."""
    found = [shutil.which("python3.9"), *Path.home().glob(".pyenv/versions/3.9.*/bin/python3.9")]
    for python in filter(None, found):
        # A version manager's shim is there without its Python.
        if subprocess.run([python, "-V"], capture_output=True, check=False).returncode == 0:
            return str(python)
    return sys.executable


PYTHON = oldest_python()


class Here:
    """A root folder of units on this machine."""

    def __init__(self, root: Path) -> None:
        self.root, self.units, self.program = root, set[str](), PROGRAM

    def call(self, verb: str, *words: str, request: Any = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PYTHON, str(self.program), verb, str(self.root), *words],
            input=None if request is None else json.dumps(request),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def ask(self, verb: str, *words: str, request: Any = None) -> Any:
        done = self.call(verb, *words, request=request)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def start(self, *argv: str, **options: Any) -> str:
        settings = {"restart": "never", "grace_s": 5.0, **options}
        launch = Launch(job="a", epoch=len(self.units) + 1, argv=argv, **settings)
        self.units.add(launch.unit)
        self.ask("start", launch.unit, request=asdict(launch))
        return launch.unit

    def refusal(self, *argv: str, **options: Any) -> str:
        launch = Launch(job="a", epoch=99, argv=argv, **options)
        done = self.call("start", launch.unit, request=asdict(launch))
        assert done.returncode == supervisor.REFUSED
        assert done.stdout == ""
        assert not (self.root / "units" / launch.unit / "request.json").exists()
        return done.stderr

    def end(self, unit: str) -> dict[str, Any]:
        """Wait until a unit has ended by itself."""
        self.until(unit, lambda: self.state(unit) == "exited")
        self.until(unit, lambda: not supervisor.Unit(str(self.root), unit).supervised())
        return dict(self.ask("status", unit))

    def state(self, unit: str) -> Any:
        """As the program writes it down: cheaper than to ask."""
        return supervisor.Unit(str(self.root), unit).read("status.json").get("state")

    def until(self, unit: str, holds: Callable[[], object]) -> None:
        try:
            until(holds, unit)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.ask('status', unit)}") from error

    def log(self, unit: str) -> str:
        return (self.root / "units" / unit / "log").read_text()


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    made = Here(tmp_path)
    yield made
    for unit in made.units:
        if supervisor.Unit(str(tmp_path), unit).supervised():
            made.ask("stop", unit, "0")


def test_it_is_python_3_9_and_needs_nothing_of_ours() -> None:
    tree = ast.parse(PROGRAM.read_text(), feature_version=(3, 9))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("restart", "retries", "exit", "runs"),
    [
        ("never", 5, 3, 1),
        ("on-failure", 1, 3, 2),
        ("on-failure", 0, 3, 1),
        ("on-failure", 5, 0, 1),
        ("on-failure", 5, FENCED, 1),
        ("always", 0, FENCED, 1),
    ],
)
def test_what_is_started_again(here: Here, restart: str, retries: int, exit: int, runs: int) -> None:
    unit = here.start("sh", "-c", f"echo run; exit {exit}", restart=restart, retries=retries)
    found = here.end(unit)
    assert found["exit"] == exit
    assert found["restarts"] == runs - 1
    assert here.log(unit) == "run\n" * runs


@pytest.mark.parametrize("exit", [0, 1, 137])
def test_what_was_fenced_off_below_a_launcher_is_not_started_again(here: Here, exit: int) -> None:
    script = f"echo run; echo over >$DRAFTHOUSE_FENCED; exit {exit}"
    unit = here.start("sh", "-c", script, restart="always", retries=5, env={"DRAFTHOUSE_FENCED": "/somewhere/else"})
    found = here.end(unit)
    assert (found["exit"], found["restarts"]) == (FENCED, 0)
    again = asdict(Launch(job="a", epoch=1, argv=("sh", "-c", "exit 3"), restart="never"))
    here.ask("start", unit, request=again)
    assert here.end(unit)["exit"] == 3, "what is started anew has a life of its own"


def test_always_means_after_success_too(here: Here) -> None:
    unit = here.start("sh", "-c", "echo run", restart="always")
    here.until(unit, lambda: here.log(unit).count("run") >= 2)
    here.ask("stop", unit, "60")
    assert here.ask("status", unit)["state"] == "exited"
    count = here.log(unit).count("run")
    time.sleep(0.3)
    assert here.log(unit).count("run") == count


def test_a_stop_ends_the_pause(here: Here, tmp_path: Path) -> None:
    text, here.program = PROGRAM.read_text(encoding="utf-8"), tmp_path / PROGRAM.name
    patient = text.replace("FIRST_PAUSE_S, LONGEST_PAUSE_S,", "FIRST_PAUSE_S, LONGEST_PAUSE_S = 600.0, 600.0\n_, _,")
    here.program.write_text(patient, encoding="utf-8")
    unit = here.start("sh", "-c", "echo run", restart="always")
    here.until(unit, lambda: here.state(unit) == "restarting")
    assert here.ask("stop", unit, "50")["seconds"] < 50
    assert here.ask("status", unit)["state"] == "exited"
    assert here.log(unit) == "run\n"


def test_a_signal_is_told_as_a_shell_tells_it(here: Here) -> None:
    assert here.end(here.start("sh", "-c", "kill -9 $$"))["exit"] == 137


def test_a_command_that_never_stops_writing_can_be_stopped(here: Here) -> None:
    unit = here.start("sh", "-c", "exec yes")
    here.until(unit, lambda: (here.root / "units" / unit / "log").exists())
    assert here.ask("stop", unit, "30")["how"] == "term"
    assert here.ask("status", unit)["exit"] == 143


def test_a_defect_is_an_end_with_a_reason(here: Here) -> None:
    folder = here.root / "units/drafthouse-a-e1"
    folder.mkdir(parents=True)
    (folder / "request.json").write_text("{}")
    (folder / "environment.json").write_text('{"TOKEN": "hush"}')
    assert here.call("run", "drafthouse-a-e1").returncode == 0
    found = here.ask("status", "drafthouse-a-e1")
    assert (found["state"], found["exit"]) == ("exited", supervisor.DEFECT)
    assert not (folder / "environment.json").exists()
    assert "KeyError: 'argv'" in here.log("drafthouse-a-e1")


def test_what_a_command_leaves_behind_ends_with_it(here: Here) -> None:
    marker = "86399.5"
    unit = here.start("sh", "-c", f"setsid sleep {marker} >/dev/null 2>&1 & exit 0")
    assert here.end(unit)["exit"] == 0
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"sleep {marker}" not in listed


def test_words_reach_the_command_as_they_are(here: Here) -> None:
    words = ["$(touch /tmp/x)", "a b", "'", '"', "", "new\nline", "ü", "--", "; id"]
    script = "import json, sys; print(json.dumps(sys.argv[1:]))"
    unit = here.start(sys.executable, "-c", script, *words)
    here.end(unit)
    assert json.loads(here.log(unit)) == words


def test_the_environment_is_what_the_job_says(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_LOGIN", "1")
    (tmp_path / "venv/bin").mkdir(parents=True)
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    env, secrets = {"A": "x y\n$HOME"}, {"B": "hush"}
    unit = here.start(
        sys.executable, "-c", script, env=env, secrets=secrets, gpus=("3", "GPU-7"), venv=str(tmp_path / "venv")
    )
    here.end(unit)
    found = json.loads(here.log(unit))
    assert found["A"] == "x y\n$HOME"
    assert found["B"] == "hush"
    assert "OF_THE_LOGIN" not in found
    assert found["PATH"].startswith(f"{tmp_path}/venv/bin:")
    assert (found["CUDA_VISIBLE_DEVICES"], found["CUDA_DEVICE_ORDER"]) == ("3,GPU-7", "PCI_BUS_ID")
    assert (found["DRAFTHOUSE_JOB"], found["DRAFTHOUSE_EPOCH"]) == ("a", "1")


@pytest.mark.parametrize(("gpus", "shown"), [(0, ""), (2, "0,1")])
def test_a_number_of_gpus_is_the_first_ones(gpus: int, shown: str, tmp_path: Path) -> None:
    request = asdict(Launch(job="a", epoch=1, argv=("true",), gpus=gpus))
    found = supervisor.environment_of(supervisor.Unit(str(tmp_path), "u"), request)
    assert found["CUDA_VISIBLE_DEVICES"] == shown


def test_secrets_stand_in_one_file_for_as_long_as_the_unit_lives(here: Here) -> None:
    unit = here.start("sleep", "1000", secrets={"TOKEN": "hush-4711"})
    folder = here.root / "units" / unit
    holders = [path.name for path in folder.iterdir() if b"hush-4711" in path.read_bytes()]
    assert holders == ["environment.json"]
    assert (folder / holders[0]).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert here.call("exec", unit, "sh", "-c", "echo $TOKEN; pwd").stdout == f"hush-4711\n{here.root}/jobs/a\n"
    here.ask("stop", unit, "5")
    assert not any(b"hush-4711" in path.read_bytes() for path in folder.iterdir())
    assert here.call("exec", unit, "true").returncode == supervisor.REFUSED


def kill_overseers(here: Here, unit: str) -> None:
    """As the kernel does when memory runs out, to all that looks after a unit."""
    made = supervisor.Unit(str(here.root), unit)
    for pid in [pid for pid in supervisor.processes() if supervisor.is_supervisor(pid, made)]:
        os.kill(pid, signal.SIGKILL)
    here.until(unit, lambda: not made.supervised())


def test_a_stop_takes_the_secrets_of_a_unit_that_nobody_looks_after(here: Here) -> None:
    unit = here.start("sh", "-c", "setsid sleep 86398.5 & exec sleep 1000", secrets={"TOKEN": "hush-4711"})
    here.until(unit, lambda: len(supervisor.Unit(str(here.root), unit).strays()) == 2)
    kill_overseers(here, unit)
    assert here.ask("stop", unit, "5")["how"] in ("kill", "absent")
    assert supervisor.Unit(str(here.root), unit).strays() == set()
    folder = here.root / "units" / unit
    assert not any(b"hush-4711" in path.read_bytes() for path in folder.iterdir())
    assert here.ask("status", unit)["state"] == "exited"


def test_a_stop_takes_the_secrets_of_a_unit_whose_overseers_are_killed_over_it(here: Here) -> None:
    script = "trap '' TERM; echo up; while :; do sleep 0.1; done"
    unit = here.start("sh", "-c", script, secrets={"TOKEN": "hush-4711"})
    here.until(unit, lambda: "up" in here.log(unit))
    words = [PYTHON, str(PROGRAM), "stop", str(here.root), unit, "30"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as stopping:
        here.until(unit, lambda: (here.root / "units" / unit / "stop.json").exists())
        kill_overseers(here, unit)
        said, _ = stopping.communicate(timeout=120)
    assert json.loads(said)["how"] == "kill"
    assert not (here.root / "units" / unit / "environment.json").exists()
    assert supervisor.Unit(str(here.root), unit).strays() == set()


def test_a_supervisor_that_is_started_again_hears_of_a_stop_that_came_meanwhile(here: Here) -> None:
    """systemd starts one that was killed again after half a second."""
    unit = here.start("sh", "-c", "echo run; exec sleep 1000", restart="always")
    here.until(unit, lambda: here.log(unit) == "run\n")
    kill_overseers(here, unit)
    here.ask("stop", unit, "5")
    assert here.call("run", unit).returncode == 0
    assert here.log(unit) == "run\n"
    assert here.ask("status", unit)["state"] == "exited"


def test_a_stop_of_what_never_was_leaves_nothing(here: Here) -> None:
    assert here.ask("stop", "drafthouse-a-e9", "5")["how"] == "absent"
    assert list(here.root.iterdir()) == []


def test_a_unit_that_runs_is_left_alone_and_one_that_has_ended_is_started_anew(here: Here) -> None:
    unit = here.start("sleep", "1000")
    again = asdict(Launch(job="a", epoch=1, argv=("sleep", "2000")))
    pid = here.ask("status", unit)["pid"]
    assert here.ask("start", unit, request=again)["pid"] == pid
    here.ask("stop", unit, "5")
    assert here.ask("start", unit, request=again)["state"] == "running"
    assert here.ask("units")[0]["unit"] == unit


def test_two_starts_at_once_start_it_once(here: Here) -> None:
    here.units.add("drafthouse-a-e1")
    request = json.dumps(asdict(Launch(job="a", epoch=1, argv=("sh", "-c", "echo run; exec sleep 1000"))))
    words = [PYTHON, str(PROGRAM), "start", str(here.root), "drafthouse-a-e1"]
    both = [subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for one in both:
        assert one.stdin is not None
        one.stdin.write(request)
        one.stdin.close()
    pids = {json.loads(one.stdout.read())["pid"] for one in both if one.stdout is not None}
    assert [one.wait() for one in both] == [0, 0, 0]
    assert len(pids) == 1
    here.until("drafthouse-a-e1", lambda: here.log("drafthouse-a-e1"))
    assert here.log("drafthouse-a-e1") == "run\n"


def test_what_cannot_start_is_told_in_one_sentence(here: Here, tmp_path: Path) -> None:
    assert here.refusal("no-such-program") == "error: there is no program no-such-program in PATH\n"
    (tmp_path / "text").write_text("x")
    assert here.refusal(str(tmp_path / "text")) == f"error: {tmp_path}/text cannot be executed\n"
    assert "there is no virtual environment in /nowhere" in here.refusal("true", venv="/nowhere")
    assert "the work folder /nowhere is not there" in here.refusal("true", workdir="/nowhere")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert here.refusal("true", ports=(port,)) == f"error: port {port} is taken by another process\n"


def test_a_program_that_is_none_is_told_in_the_log(here: Here, tmp_path: Path) -> None:
    (tmp_path / "broken").write_bytes(b"\x7fELF nonsense")
    (tmp_path / "broken").chmod(0o755)
    unit = here.start(str(tmp_path / "broken"))
    assert here.end(unit)["exit"] == 126
    assert "cannot be started" in here.log(unit)


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out", "link/out", "."])
def test_a_file_never_leaves_the_folder_of_its_job(name: str, here: Here, tmp_path: Path) -> None:
    (tmp_path / "jobs/a").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "jobs/a/link").symlink_to(tmp_path / "elsewhere")
    assert "would lie outside of the job's folder" in here.refusal("true", files={name: "x"})
    assert not list(tmp_path.rglob("out"))


def test_files_of_a_job_are_private_and_outlive_its_epochs(here: Here) -> None:
    unit = here.start("cat", "conf/a.yml", files={"conf/a.yml": "x: ü\n"})
    here.end(unit)
    assert here.log(unit) == "x: ü\n"
    assert (here.root / "jobs/a/conf/a.yml").stat().st_mode & 0o777 == 0o600
    here.ask("remove", unit)
    assert (here.root / "jobs/a/conf/a.yml").exists()
    assert here.ask("status", unit)["state"] == "absent"
    here.units.clear()


def test_a_running_unit_cannot_be_removed(here: Here) -> None:
    unit = here.start("sleep", "1000")
    assert here.call("remove", unit).stderr == f"error: {unit} still runs\n"
    assert here.ask("status", unit)["state"] == "running"


def test_a_log_is_bounded_and_followed_over_its_rotations(here: Here) -> None:
    size = 2 * supervisor.LOG_BYTES + 2**20
    script = f"""
import sys, time
line = "x" * 99 + "\\n"
for _ in range({size // 100 // 600}):
    sys.stdout.write(line * 600); sys.stdout.flush(); time.sleep(0.003)
print("end")
"""
    unit = here.start(sys.executable, "-c", script)
    followed = here.call("logs", unit, "-1", "follow").stdout
    assert followed.endswith("end\n")
    assert here.ask("status", unit)["state"] == "exited"
    files = list((here.root / "units" / unit).glob("log*"))
    assert len(files) == supervisor.LOG_FILES
    assert all(file.stat().st_size <= supervisor.LOG_BYTES for file in files)
    assert here.call("logs", unit, "2", "once").stdout == "x" * 99 + "\nend\n"


def test_a_full_disk_loses_lines_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, write = supervisor.Log(tmp_path / "log"), os.write
    log.write(b"one\n")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    log.write(b"two\n")
    monkeypatch.setattr(os, "write", write)
    log.write(b"three\n")
    note = "[drafthouse: 4 bytes of this log were lost, the disk was full]"
    assert (tmp_path / "log").read_text() == f"one\n{note}\nthree\n"


@given(st.lists(st.text(alphabet="ab\r", max_size=5), max_size=6), st.integers(0, 8), st.booleans())
def test_last_lines(lines: list[str], count: int, whole: bool) -> None:
    text = "\n".join(lines) + ("\n" if whole and lines else "")
    kept = text.split("\n")[:-1] if text.endswith("\n") else text.split("\n")
    wanted = "\n".join(kept[len(kept) - min(count, len(kept)) :]) + ("\n" if text.endswith("\n") and count else "")
    assert supervisor.last_lines(text.encode(), count).decode() == wanted


@given(st.from_regex(r"[a-z0-9][a-z0-9-]{0,62}", fullmatch=True), st.integers(1, 999_999_999))
def test_a_unit_says_whose_life_it_is(job: str, epoch: int) -> None:
    assert parse_unit(unit_name(job, epoch)) == (job, epoch)


@pytest.mark.parametrize("name", ["drafthouse-a", "drafthouse-a-e0", "drafthouse-A-e1", "sshd", "drafthouse-a-e1\n"])
def test_other_names_are_not_units(name: str) -> None:
    assert parse_unit(name) is None
