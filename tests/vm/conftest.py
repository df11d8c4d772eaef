"""One image and one boot for all scenarios; each begins from a snapshot."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.vm.runfile import pack

from . import image as images
from .machine import Machine, MachineError, relabelled_qemu
from .playbook import Playbooks
from .requirements import debian, missing

VERSION = "580.126.09"
#: What took how long, in seconds: shown at the end, because the tier has a budget.
TIMES: list[tuple[str, float]] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vm)


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """A short path, because sockets lie below it; the disks of the machine are there too."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    made = Path(tempfile.mkdtemp(prefix="vm-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="session")
def machine(folder: Path) -> Iterator[Machine]:
    """The machine after its first boot, saved as `clean`."""
    try:
        relabelled_qemu(folder / "probe")
    except MachineError as reason:
        pytest.skip(f"no display device can be made to look like an NVIDIA card: {reason}")
    release = debian()
    assert release is not None
    image, seconds = images.build(images.kept() or folder / "image", release, VERSION)
    disks = folder / "m"
    disks.mkdir()
    booted = Machine(image, disks)
    try:
        TIMES.append(("image", seconds))
        TIMES.append(("boot to the first login", booted.start()))
        booted.save("clean")
        yield booted
    finally:
        booted.stop()


@pytest.fixture(scope="session")
def playbooks(machine: Machine, folder: Path) -> Playbooks:
    """Playbooks against the machine, with the installer's double in the controller's cache."""
    cache, work = folder / "cache", folder / "a"
    cache.mkdir()
    work.mkdir()
    _, sha256 = pack(VERSION, machine.image.folder / "libraries", cache)
    return Playbooks(machine, work, cache, VERSION, sha256, TIMES)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker hands its times to the process that prints them."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["vm_times"] = TIMES


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    TIMES.extend(tuple(each) for each in getattr(node, "workeroutput", {}).get("vm_times", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TIMES:
        terminalreporter.section("times of the virtual machine tier")
    for what, seconds in TIMES:
        terminalreporter.write_line(f"{seconds:7.1f} s  {what}")
