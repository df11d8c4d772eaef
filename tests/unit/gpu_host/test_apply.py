"""Steps on files: what they leave, and that the way back gives text, permissions and owner."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from gpu_host.apply import apply
from gpu_host.steps import ApplyError, Plan, Step
from gpu_host.world import World

FAILS = Step("run", "false", "it fails", {"argv": ["false"]})


@pytest.fixture
def grub(tmp_path: Path) -> Path:
    """A file that others wrote, with permissions of its own."""
    file = tmp_path / "etc/default/grub"
    file.parent.mkdir(parents=True)
    file.write_text("old\n", encoding="utf-8")
    file.chmod(0o640)
    return file


def write(**detail: Any) -> Step:
    return Step("write", "/etc/default/grub", "it changes", {"text": "new\n", **detail})


def state(file: Path) -> tuple[str, int]:
    return file.read_text(encoding="utf-8"), stat.S_IMODE(file.stat().st_mode)


@pytest.mark.parametrize(("detail", "mode"), [({}, 0o640), ({"mode": 0o755}, 0o755)])
def test_a_rewritten_file_keeps_its_permissions_unless_others_are_given(
    grub: Path, tmp_path: Path, detail: dict[str, Any], mode: int
) -> None:
    apply(Plan([write(**detail)]), World(str(tmp_path)))
    assert state(grub) == ("new\n", mode)


@pytest.mark.parametrize("step", [write(), write(mode=0o755), Step("remove", "/etc/default/grub", "it goes")])
def test_the_way_back_gives_text_and_permissions(grub: Path, tmp_path: Path, step: Step) -> None:
    with pytest.raises(ApplyError, match="earlier steps were undone"):
        apply(Plan([step, FAILS]), World(str(tmp_path)))
    assert state(grub) == ("old\n", 0o640)


def test_a_new_file_is_readable_and_goes_on_the_way_back(tmp_path: Path) -> None:
    world = World(str(tmp_path))
    apply(Plan([write()]), world)
    assert state(tmp_path / "etc/default/grub") == ("new\n", 0o644)
    world.remove("/etc/default/grub")
    with pytest.raises(ApplyError):
        apply(Plan([write(), FAILS]), world)
    assert not world.exists("/etc/default/grub")
