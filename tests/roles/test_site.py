"""`site.yml` on the example host: converges, changes nothing when run again, and `reset.yml` leads back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.machine.boot import Machine, machine
from tests.roles.runs import Run, needs_machine, playbook

pytestmark = needs_machine
CARDS = {"0000:41:00.0": "nvidia", "0000:42:00.0": "nvidia", "0000:81:00.0": "vfio-pci", "0000:82:00.0": "vfio-pci"}
#: What stays after a reset: build tools and the daemon's user are no assignment; logs and caches no state.
STAYS = re.compile(
    r"^(129:)?/(var/(log|cache|lib/(dpkg|apt))|etc/(passwd|group|shadow|gshadow|subuid|subgid)-?$|etc/\.pwd\.lock|etc/ld\.so\.cache)"
    r"|^129:/usr/(bin/ffmpeg|lib/x86_64-linux-gnu/libavcodec)"
)


@pytest.fixture(scope="module")
def kpro5(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with machine(tmp_path_factory.mktemp("site") / "machine", "kpro5") as running:
        yield running


def _site(running: Machine, book: str = "site.yml") -> Run:
    done = playbook(running.folder, book, "--limit", "kpro5")
    assert done.rc == 0, done.text
    return done


def _drivers(running: Machine) -> dict[str, str]:
    links = {card: running.run("readlink", f"/sys/bus/pci/devices/{card}/driver").stdout for card in CARDS}
    return {card: Path(link.strip()).name for card, link in links.items()}


def _inside(running: Machine, *argv: str) -> str:
    done = running.run("pct", "exec", "129", "--", *argv)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_first_run_converges(kpro5: Machine) -> None:
    assert set(_drivers(kpro5).values()) == {"vfio-pci"}
    done = _site(kpro5)
    assert done.counts("kpro5")["changed"] > 0
    assert _drivers(kpro5) == CARDS
    assert _inside(kpro5, "nvidia-smi", "-L").count("RTX A6000") == 2
    assert _inside(kpro5, "python3", "-c", "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))") == "0\n"
    given = re.findall(r"^dev\d+: (/dev/nvidia\S*?),", kpro5.run("pct", "config", "129").stdout, re.MULTILINE)
    assert sorted(given) == [f"/dev/nvidia{name}" for name in ("-uvm", "-uvm-tools", "0", "1", "ctl")]


def test_second_run_changes_nothing(kpro5: Machine) -> None:
    mutators, files = len(kpro5.commands("mutator")), kpro5.touched()
    done = _site(kpro5)
    assert done.counts("kpro5")["changed"] == 0, done.tasks("changed")
    assert kpro5.commands("mutator")[mutators:] == []
    assert kpro5.touched() == files


def test_boot_service_finds_every_card_where_the_container_expects_it(kpro5: Machine) -> None:
    started = kpro5.run("systemctl", "restart", "drafthouse-nvidia-nodes", "nvidia-persistenced")
    assert started.returncode == 0, started.stderr
    # The container is given the first card twice: a service that passed before has to notice.
    assert kpro5.run("sed", "-i", "s,^dev1: /dev/nvidia1,dev1: /dev/nvidia0,", "/etc/pve/lxc/129.conf").returncode == 0
    failed = kpro5.run("systemctl", "restart", "drafthouse-nvidia-nodes")
    assert failed.returncode != 0
    assert "run lxc_gpu for this host" in failed.stderr
    again = _site(kpro5)
    assert again.counts("kpro5")["changed"] > 0
    assert kpro5.run("systemctl", "restart", "drafthouse-nvidia-nodes").returncode == 0


def test_reset_restores(kpro5: Machine) -> None:
    _site(kpro5, "playbooks/reset.yml")
    assert set(_drivers(kpro5).values()) == {"vfio-pci"}
    empty_folders = {path for path, what in kpro5.changes().items() if what.startswith("d")}
    left = {path: what for path, what in kpro5.changes().items() if not STAYS.match(path) and path not in empty_folders}
    assert left == {}
