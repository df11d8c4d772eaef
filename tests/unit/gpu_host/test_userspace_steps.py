"""The libraries of a container as they are read and installed through `pct` of a host tree."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpu_host import apt, runfile
from gpu_host.apply import apply
from gpu_host.binding import plan as plan_binding
from gpu_host.binding_steps import HANDLERS as BINDING_HANDLERS
from gpu_host.gather import gather
from gpu_host.passthrough import PassthroughDesired
from gpu_host.passthrough import plan as plan_passthrough
from gpu_host.passthrough_steps import HANDLERS as PASSTHROUGH_HANDLERS
from gpu_host.steps import ApplyError, Plan, Step
from gpu_host.userspace import plan
from gpu_host.userspace_state import (
    LIBRARY_FOLDER,
    UserspaceDesired,
    UserspacePlan,
    UserspaceState,
    gather_state,
    why_waiting,
)
from gpu_host.userspace_steps import HANDLERS
from gpu_host.world import ContainerWorld
from tests.doubles.host_tree import kpro5
from tests.unit.gpu_host import driver_programs
from tests.unit.gpu_host.host_facts import wants

VERSION, OLD = "580.126.09", "570.148.08"
RUNFILE = f"/var/cache/drafthouse/{runfile.name_of(VERSION)}"


class Inside:
    """Container 129 of kpro5, running, with 32 GiB and FFmpeg."""

    def __init__(self, path: Path) -> None:
        self.host = kpro5(path)
        self.host.world.must(["pct", "start", "129"])
        self.machine = driver_programs.inside(self.host, 129)
        self.tree = self.machine.tree
        self.world = ContainerWorld(self.host.world, 129)
        self.tree.file("/etc/os-release", "NAME=Ubuntu\nID=ubuntu\nVERSION_ID=24.04\n")
        self.tree.file("/proc/meminfo", "MemTotal:        33554432 kB\n")
        self.tree.file(f"{LIBRARY_FOLDER}/libavcodec.so.60", "")
        self.host.file(RUNFILE, "an installer\n")
        driver_programs.Machine(self.host)
        sha256 = runfile.sha256_of(self.host.world, RUNFILE) or ""
        self.desired = UserspaceDesired(VERSION, vmid=129, runfile=RUNFILE, sha256=sha256, probe=False)

    def look(self) -> UserspaceState:
        facts = gather(self.host.world)
        return gather_state(self.world, self.desired, "", partial(why_waiting, facts, self.desired))

    def plan(self, **changes: Any) -> UserspacePlan:
        return plan(gather(self.host.world), self.look(), replace(self.desired, **changes), ahead=True)

    def steps(self, **changes: Any) -> list[Step]:
        made = self.plan(**changes)
        assert not made.refused, made.refusal_text()
        return made.steps

    def take(self, steps: list[Step]) -> list[str]:
        return apply(Plan(steps), self.world, HANDLERS)


@pytest.fixture
def inside(tmp_path: Path) -> Inside:
    return Inside(tmp_path)


@pytest.mark.parametrize("before", [None, OLD])
def test_installed_once_and_then_nothing_is_left(inside: Inside, before: str | None) -> None:
    if before:
        inside.machine.libraries(before)
        inside.tree.file(runfile.UNINSTALLER, "")
    done = inside.take(inside.steps())
    assert any("runfile" in sentence for sentence in done)
    assert inside.steps() == []
    assert inside.tree.world.names("/var/tmp") == []  # hundreds of megabytes do not stay behind
    assert inside.tree.world.read(apt.PREFERENCES) == apt.preferences(None)


def test_the_way_back_restores_the_container(inside: Inside) -> None:
    def files() -> dict[str, str]:
        return {path: text for path, text in inside.tree.snapshot().items() if not path.startswith("/var/log")}

    before = files()
    inside.take(inside.steps())
    assert files() != before
    inside.take(inside.steps(state="absent"))
    assert inside.steps(state="absent") == []
    folders = {path for path in files() if path not in before}
    assert all(inside.tree.path(path).is_dir() for path in folders)
    assert {path: text for path, text in files().items() if path in before} == before


def test_looking_changes_nothing(inside: Inside) -> None:
    before = inside.tree.snapshot()
    for source in ("runfile", "apt"):
        inside.desired = replace(inside.desired, source=source, probe=True)
        inside.plan()
    assert inside.tree.snapshot() == before


def test_by_apt_exactly_and_held(inside: Inside) -> None:
    names = apt.library_packages("ubuntu", VERSION)
    inside.desired = replace(inside.desired, source="apt")
    inside.machine.archive = dict.fromkeys(names, ("580.173.02-1ubuntu1", f"{VERSION}-1ubuntu1"))
    steps = inside.steps()
    inside.machine.libraries(VERSION)  # what the packages contain
    inside.take(steps)
    assert inside.steps() == []
    assert {inside.tree.packages[name] for name in names} == {f"{VERSION}-1ubuntu1"}
    assert inside.machine.held == set(names)


@pytest.mark.parametrize(
    ("abort", "told"), [("ERROR: aborted\n", "aborted"), ("No space left on device\n", "free space")]
)
def test_an_installer_that_aborts_is_quoted_and_removed(inside: Inside, abort: str, told: str) -> None:
    """Row 30: the log says why, the status does not."""
    inside.machine.abort = abort
    with pytest.raises(ApplyError) as failure:
        inside.take(inside.steps())
    assert "ended with 1 and the loader knows no libcuda.so.1" in str(failure.value)
    assert told in str(failure.value)
    assert inside.tree.world.names("/var/tmp") == []
    assert inside.look().texts[apt.PREFERENCES] is None  # the steps before it were undone


def test_a_lying_installer_is_found_out(inside: Inside) -> None:
    inside.machine.libraries(OLD)
    inside.tree.file(runfile.UNINSTALLER, "")
    inside.machine.lies("sh")
    with pytest.raises(ApplyError, match=f"ended with 0 and .*libcuda.so.{OLD}"):
        inside.take(inside.steps())


def test_what_stands_in_the_container_is_read(inside: Inside) -> None:
    inside.machine.libraries(OLD)
    inside.tree.package("libnvidia-compute-570", f"{OLD}-0ubuntu1").package("libnvidia-container1", "1.17.8-1")
    state = inside.look()
    assert state.distribution == "ubuntu"
    assert state.libraries == (f"{LIBRARY_FOLDER}/libcuda.so.{OLD}", f"{LIBRARY_FOLDER}/libnvidia-ml.so.{OLD}")
    assert state.resolved[f"{LIBRARY_FOLDER}/libcuda.so.1"] == f"{LIBRARY_FOLDER}/libcuda.so.{OLD}"
    assert state.packages == {"libnvidia-compute-570": f"{OLD}-0ubuntu1"}
    assert state.codecs == (60,)
    assert (state.free_mb, state.memory_mb) == (44000, 32768)
    assert not state.uninstaller


def test_a_link_to_nowhere_and_a_circle_do_not_hang(inside: Inside) -> None:
    folder = inside.tree.path(LIBRARY_FOLDER)
    (folder / "libcuda.so.1").symlink_to("libcuda.so.gone")
    (folder / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.1")
    assert set(inside.look().resolved.values()) == {""}


def test_libraries_of_nobody_are_removed(inside: Inside) -> None:
    inside.machine.libraries(OLD)
    path = f"{LIBRARY_FOLDER}/libcuda.so.{OLD}"
    inside.take([Step("remove-libraries", "1 files", "test", {"paths": [path]})])
    assert not inside.tree.world.exists(path)
    inside.machine.lies("rm")
    inside.tree.file(path, "")
    with pytest.raises(ApplyError, match="still there"):
        inside.take([Step("remove-libraries", "1 files", "test", {"paths": [path]})])


def test_nvml_and_cuda_are_asked_only_where_the_libraries_fit(inside: Inside) -> None:
    inside.machine.nvml, inside.machine.cuda = "Failed to initialize NVML: Driver/library version mismatch", 803
    inside.desired = replace(inside.desired, probe=True)
    assert inside.look().probe is None
    inside.machine.libraries(VERSION)
    probe = inside.look().probe
    assert probe is not None
    assert "version mismatch" in probe.nvml
    assert probe.cuda == 803


@pytest.mark.parametrize("form", ["dev", "raw"])
def test_cards_that_come_with_the_next_start_are_not_asked_before_it(inside: Inside, form: str) -> None:
    """`pct set` on a running container waits in the section for pending changes, raw keys for the next start."""
    host, card = inside.host, "0000:41:00.0"
    host.driver(VERSION)
    apply(plan_binding(gather(host.world), wants()), host.world, BINDING_HANDLERS)
    given = PassthroughDesired(129, (card,), form=form)
    apply(plan_passthrough(gather(host.world), given), host.world, PASSTHROUGH_HANDLERS)
    inside.desired = replace(inside.desired, probe=True)
    inside.machine.libraries(VERSION)
    inside.machine.nvml, inside.machine.cuda = "No devices were found", 100
    made = inside.plan()
    assert not made.refused, made.refusal_text()
    assert made.notes == [
        "container 129 has to be restarted before NVML and CUDA can be asked in it "
        "(/dev/nvidia-uvm is not inside yet): `pct reboot 129`, or set lxc_gpu_restart to true"
    ]
    inside.take(made.steps)
    assert (inside.plan().steps, inside.machine.calls("nvidia-smi")) == ([], [])
    host.world.must(["pct", "reboot", "129"])
    assert [refusal.rule for refusal in inside.plan().refusals] == ["no-devices", "cuda-100"]
    inside.machine.nvml, inside.machine.cuda = "GPU 0: NVIDIA RTX A6000", 0
    assert inside.plan().as_dict() == UserspacePlan().as_dict()


def test_a_look_costs_two_calls(inside: Inside) -> None:
    """One for all that every look asks, one for NVML and CUDA where they can answer."""
    inside.desired = replace(inside.desired, probe=True)
    inside.take(inside.steps())
    inside.host.world.commands.clear()
    assert inside.look().probe is not None
    assert len([argv for argv in inside.host.world.commands if argv[:2] == ["pct", "exec"]]) == 2
