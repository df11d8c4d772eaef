"""The machine double itself: what the other tests here rely on."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.machine.boot import REPOSITORY, Machine, MachineError, machine, up
from tests.doubles.machine.elf import library
from tests.doubles.machine.programs import kind
from tests.patience import until
from tests.roles.runs import needs_machine

A6000 = "/sys/bus/pci/devices/0000:41:00.0"


@pytest.fixture(scope="module")
def kpro5(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with machine(tmp_path_factory.mktemp("double") / "machine", "kpro5-installed") as running:
        yield running


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@needs_machine
def test_nothing_of_it_is_seen_outside_and_nothing_stays(tmp_path: Path) -> None:
    mounts, name = Path("/proc/self/mounts").read_text(encoding="utf-8"), os.uname().nodename
    with machine(tmp_path / "machine", "kpro5") as running:
        assert running.run("hostname").stdout == "kpro5\n"
        running.run("sh", "-c", "echo changed > /etc/drafthouse-double")
        assert Path("/proc/self/mounts").read_text(encoding="utf-8") == mounts
        inside = subprocess.Popen([*running.command(), "sleep", "600"])
        pid = running.pid
    until(lambda: not _lives(pid), "the machine's end")
    assert inside.wait(240) != 0, "what ran inside was killed with it"
    assert not (tmp_path / "machine").exists()
    assert not Path("/etc/drafthouse-double").exists()
    assert os.uname().nodename == name


@needs_machine
def test_it_ends_with_a_killed_owner(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from tests.doubles.machine.boot import up\n"
        "print(up(Path(sys.argv[1]), 'depot').pid, flush=True); time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'ansible/module_utils'}"}
    owner = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "machine")], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert _lives(pid)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    until(lambda: not _lives(pid), "the machine's end")


@needs_machine
def test_a_machine_that_cannot_be_says_why(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"invalid choice: 'toaster'"):
        up(tmp_path / "machine", "toaster")


@needs_machine
def test_sysfs_acts_as_the_kernel_does(kpro5: Machine) -> None:
    def driver() -> str:
        return Path(kpro5.run("readlink", f"{A6000}/driver").stdout.strip()).name

    def write(text: str, path: str) -> None:
        assert kpro5.run("sh", "-c", f"printf '{text}' > {path}").returncode == 0

    write("0000:41:00.0", f"{A6000}/driver/unbind")
    until(lambda: driver() == "", "the card without a driver")
    write("nvidia", f"{A6000}/driver_override")
    assert kpro5.run("modprobe", "nvidia").returncode == 0
    assert driver() == "nvidia"
    assert "Device Minor: \t 0" in kpro5.run("cat", "/proc/driver/nvidia/gpus/0000:41:00.0/information").stdout
    write("\\n", f"{A6000}/driver_override")
    kpro5.touched()
    assert kpro5.run("cat", f"{A6000}/driver_override").stdout == "(null)\n"


@needs_machine
def test_apt_is_real_and_has_its_own_archive(kpro5: Machine) -> None:
    assert kpro5.run("apt-get", "-s", "install", "ffmpeg").returncode == 0
    assert "ffmpeg" not in kpro5.run("dpkg-query", "-W").stdout
    assert kpro5.run("apt-get", "-y", "install", "ffmpeg").returncode == 0
    assert "libavcodec.so.61" in kpro5.run("ldconfig", "-p").stdout
    assert kpro5.commands("mutator")[-1] == "apt-get -y install ffmpeg"


def test_its_libraries_load(tmp_path: Path) -> None:
    (tmp_path / "libtwo.so").write_bytes(library("libtwo.so.1", {"first": 7, "second": -3}))
    loaded = ctypes.CDLL(str(tmp_path / "libtwo.so"))
    assert (loaded.first(0), loaded.second()) == (7, -3)
    assert not hasattr(loaded, "third")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("systemctl is-active docker", "reader"),
        ("systemctl enable --now docker", "mutator"),
        ("apt-get -s install dkms", "reader"),
        ("apt-get -y install dkms", "mutator"),
        ("apt-mark showhold", "reader"),
        ("apt-mark hold dkms", "mutator"),
        ("pct config 129", "reader"),
        ("pct set 129 -dev0 /dev/nvidia0", "mutator"),
        ("pct exec 129 -- apt-mark showhold", "reader"),
        ("pct exec 129 -- rm -f /etc/motd", "mutator"),
        ("something unheard of", "mutator"),
    ],
)
def test_commands_are_judged_by_what_they_could_do(command: str, expected: str) -> None:
    assert kind(command.split()) == expected
