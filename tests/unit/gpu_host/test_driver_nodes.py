"""The script of the boot unit, run over a tree with stand-ins for modprobe and nvidia-modprobe on the PATH."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "ansible/roles/nvidia_driver/files/nvidia_nodes.py"
FIRST, SECOND = "0000:41:00.0", "0000:42:00.0"

Boot = Callable[..., tuple[int, list[str]]]


@pytest.fixture(scope="module")
def nodes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("nvidia_nodes", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def boot(nodes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Boot:
    """Boots a tree: the cards' minors, a container's wish and its configuration; returns the status and the calls."""
    programs = tmp_path / "bin"
    programs.mkdir()
    log = tmp_path / "calls"
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr(nodes, "WAIT_S", 0.3)

    def run(
        minors: dict[str, int | None], wish: list[str] | None, conf: str | None, modprobe_rc: int = 0
    ) -> tuple[int, list[str]]:
        for name, status in (("modprobe", 0), ("nvidia-modprobe", modprobe_rc)):
            program = programs / name
            program.write_text(
                f'#!/bin/sh\necho "{name} $*" >> {log}\n[ {status} = 0 ] || echo refused\nexit {status}\n'
            )
            program.chmod(0o755)
        root = tmp_path / "root"
        for address, minor in minors.items():
            folder = root / "proc/driver/nvidia/gpus" / address
            folder.mkdir(parents=True)
            line = f"Device Minor: \t {minor}\n" if minor is not None else ""
            (folder / "information").write_text(f"Model: \t\t NVIDIA RTX A6000\n{line}")
        if wish is not None:
            (root / "etc/drafthouse").mkdir(parents=True)
            (root / "etc/drafthouse/nvidia-nodes.json").write_text(json.dumps([{"vmid": 129, "addresses": wish}]))
        if conf is not None:
            (root / "etc/pve/lxc").mkdir(parents=True)
            (root / "etc/pve/lxc/129.conf").write_text(conf)
        status = nodes.main(root)
        return status, log.read_text().splitlines() if log.exists() else []

    return run


def test_all_nodes_are_made_before_guests_start(boot: Boot) -> None:
    """Rows 7, 8, 24, 27: no udev rule makes them, a container that names one does not start without it."""
    status, calls = boot(
        {FIRST: 0, SECOND: 1}, [FIRST, SECOND], "dev0: /dev/nvidia0\ndev1: path=/dev/nvidia1,mode=0666\n"
    )
    assert status == 0
    assert calls == ["modprobe nvidia", "nvidia-modprobe -c 255 -c 0 -c 1", "nvidia-modprobe -u -c 0"]


def test_a_card_that_changed_its_minor_is_told(boot: Boot, capsys: pytest.CaptureFixture[str]) -> None:
    """Row 22: the number of a node is the order of discovery, not the card."""
    status, _ = boot({FIRST: 1, SECOND: 0}, [FIRST], "dev0: /dev/nvidia0,mode=0666\n")
    assert status == 1
    told = capsys.readouterr().err
    assert "container 129" in told
    assert "passes in /dev/nvidia0 and since this boot its cards are /dev/nvidia1" in told


def test_two_cards_of_one_container_may_change_places(boot: Boot) -> None:
    assert boot({FIRST: 1, SECOND: 0}, [FIRST, SECOND], "dev0: /dev/nvidia0\ndev1: /dev/nvidia1\n")[0] == 0


@pytest.mark.parametrize(
    "conf",
    [
        "arch: amd64\n\n[pve:pending]\ndev0: /dev/nvidia0\n",
        "arch: amd64\n\n[before-upgrade]\ndev0: /dev/nvidia0\n",
        "dev0: /dev/nvidiactl\n",
    ],
)
def test_only_what_the_container_has_now_counts(boot: Boot, conf: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert boot({FIRST: 0}, [FIRST], conf)[0] == 1
    assert "passes in no card" in capsys.readouterr().err


def test_raw_entries_count_too(boot: Boot) -> None:
    conf = "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file\n"
    assert boot({FIRST: 0}, [FIRST], conf)[0] == 0


def test_a_card_without_a_minor_is_not_driven(boot: Boot, capsys: pytest.CaptureFixture[str]) -> None:
    """Row 23: `Device Minor` is missing while a card is not initialised."""
    status, calls = boot({FIRST: None}, [FIRST], "dev0: /dev/nvidia0\n")
    assert status == 1
    assert f"nvidia does not drive {FIRST}" in capsys.readouterr().err
    assert "nvidia-modprobe -c 255" in calls


def test_a_failed_nvidia_modprobe_is_told(boot: Boot, capsys: pytest.CaptureFixture[str]) -> None:
    assert boot({FIRST: 0}, [FIRST], "dev0: /dev/nvidia0\n", modprobe_rc=1)[0] == 1
    assert "nvidia-modprobe -u -c 0 ended with 1: refused" in capsys.readouterr().err


@pytest.mark.parametrize(("wish", "conf"), [(None, None), ([], "dev0: /dev/dri/renderD128\n")])
def test_a_host_without_containers_of_ours_is_fine(boot: Boot, wish: list[str] | None, conf: str | None) -> None:
    assert boot({FIRST: 0}, wish, conf)[0] == 0


def test_a_container_that_is_not_there_yet_is_fine(boot: Boot) -> None:
    assert boot({FIRST: 0}, [FIRST], None)[0] == 0
