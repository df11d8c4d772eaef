"""The steps of the driver as they act on a host tree; nobody's word is taken for the result."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_host import apt, runfile
from gpu_host.apply import apply
from gpu_host.driver import plan
from gpu_host.driver_state import (
    PERSISTENCE_UNIT,
    PIN_MARKER,
    DriverDesired,
    DriverPlan,
    ManagedFile,
    gather_state,
)
from gpu_host.driver_steps import HANDLERS
from gpu_host.gather import gather
from gpu_host.steps import ApplyError, Plan, Step
from gpu_host.world import World
from tests.doubles.host_tree import kpro5
from tests.unit.gpu_host.driver_programs import Machine

VERSION, OLD = "580.126.09", "570.148.08"
KERNEL = "6.17.2-1-pve"
NODES = "drafthouse-nvidia-nodes.service"
RUNFILE = f"/var/cache/drafthouse/{runfile.name_of(VERSION)}"
INSTALL = Step(
    "runfile",
    RUNFILE,
    "test",
    {"argv": runfile.host_arguments(RUNFILE, "open", False), "version": VERSION, "kernel": KERNEL},
)
BUILD = Step("dkms-install", KERNEL, "test", {"version": VERSION})
UNLOAD = Step("unload", "nvidia", "test", {"persistenced": True})
LOAD = Step("load", "nvidia", "test", {"version": VERSION})


class Host(Machine):
    """kpro5 with both A6000 free for the driver, so that its module can be loaded."""

    def __init__(self, path: Path) -> None:
        super().__init__(kpro5(path))
        for address in ("0000:41:00.0", "0000:42:00.0"):
            self.world.kernel.detach(address)
            self.world.poke(f"/sys/bus/pci/devices/{address}/driver_override", "nvidia")
        self.tree.file(RUNFILE, "an installer\n")
        self.tree.file("/etc/passwd", "root:x:0:0::/root:/bin/sh\n")
        self.tree.file("/etc/modprobe.d/blacklist-gpu.conf", "")
        sha256 = runfile.sha256_of(self.world, RUNFILE) or ""
        files = (ManagedFile(f"/etc/systemd/system/{NODES}", "[Unit]\n", unit=True),)
        self.desired = DriverDesired(
            version=VERSION, runfile=RUNFILE, sha256=sha256, files=files, units=(NODES, PERSISTENCE_UNIT)
        )
        self.archive = dict.fromkeys(("dkms", "gcc", "make", "libc6-dev", "pkg-config"), ("1",))

    def take(self, *steps: Step) -> list[str]:
        return apply(Plan(list(steps)), self.world, HANDLERS)

    def plan(self, desired: DriverDesired | None = None) -> DriverPlan:
        chosen = desired or self.desired
        return plan(gather(self.world), gather_state(self.world, chosen), chosen, runfile_coming=True)

    def converge(self, desired: DriverDesired | None = None) -> DriverPlan:
        """Plan, act, and plan again: what is left."""
        made = self.plan(desired)
        assert not made.refused, made.refusal_text()
        apply(made, self.world, HANDLERS)
        return self.plan(desired)

    def module(self) -> str | None:
        return (self.world.kernel.module_file("nvidia") or {}).get("version")

    def loaded(self) -> str:
        return gather(self.world).driver_version

    def load(self, version: str) -> None:
        """An older driver is loaded, and its persistence daemon runs."""
        self.tree.driver(version, loaded=True)
        self.world.answer(["nvidia-modprobe", "-c", "0", "-c", "1"])
        self.world.answer(["systemctl", "start", PERSISTENCE_UNIT])


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


# -- the whole way -----------------------------------------------------------------------------------------------------


def test_a_host_converges_and_a_second_plan_is_empty(host: Host) -> None:
    left = host.converge()
    assert left.as_dict() == {"steps": [], "refusals": [], "notes": [], "reboot": "", "wants_runfile": False}
    assert host.module() == VERSION
    assert host.loaded() == ""  # loading is for the role that frees the cards


def test_kernels_with_headers_of_their_own_converge_too(host: Host) -> None:
    """Row 6: the module for each kernel that fits, no headers for those that do not."""
    host.tree.kernel("6.14.8-2-pve", running=False).kernel("7.0.2-1-pve", running=False)
    host.tree.file("/etc/kernel/proxmox-boot-pin", f"{KERNEL}\n")
    assert host.converge().steps == []
    facts = gather(host.world)
    assert facts.headers == ("6.14.8-2-pve", KERNEL)
    assert facts.module_versions == {"6.14.8-2-pve": VERSION, KERNEL: VERSION}
    assert not [name for name in facts.header_packages if "7.0" in name]


def test_a_loaded_older_driver_is_replaced(host: Host) -> None:
    """Rows 13, 14, 17: the daemon holds the old module open and is stopped for it."""
    host.load(OLD)
    assert any("nvidia-persistenced" in who for users in gather(host.world).users.values() for who in users)
    assert host.converge().steps == []
    facts = gather(host.world)
    assert facts.driver_version == VERSION
    assert {build.version for build in facts.dkms} == {VERSION}
    assert host.world.answer(["systemctl", "is-active", PERSISTENCE_UNIT]).out == "active\n"


def test_a_pinned_kernel_waits_for_its_boot(host: Host) -> None:
    host.tree.kernel("7.0.2-1-pve")
    allowed = DriverDesired(**{**vars(host.desired), "pin_kernel": True})
    left = host.converge(allowed)
    assert left.steps == []
    assert "7.0.2-1-pve" in left.reboot
    assert host.world.read("/etc/kernel/proxmox-boot-pin") == f"{KERNEL}\n"
    host.tree.file("/proc/sys/kernel/osrelease", f"{KERNEL}\n")
    left = host.converge(allowed)
    assert (left.steps, left.reboot) == ([], "")
    assert host.module() == VERSION


def test_by_apt_exactly_and_held(host: Host) -> None:
    names = ("nvidia-kernel-open-dkms", "libcuda1")
    host.archive |= dict.fromkeys(names, ("580.173.02-1", f"{VERSION}-1"))
    by_apt = DriverDesired(**{**vars(host.desired), "source": "apt", "packages": names})
    host.tree.driver(VERSION)  # what the package's own post-installation does
    assert host.converge(by_apt).steps == []
    assert {host.tree.packages[name] for name in names} == {f"{VERSION}-1"}
    assert host.held == set(names)


@pytest.mark.parametrize("loaded", [False, True])
def test_the_way_back_restores_the_host(host: Host, loaded: bool) -> None:
    def settings() -> dict[str, str]:
        kept = host.tree.snapshot()
        return {
            path: text for path, text in kept.items() if path.startswith(("/etc", "/lib", "/sys/module", "/proc/d"))
        }

    host.converge(DriverDesired(**{**vars(host.desired), "state": "absent"}))
    for name in ("dkms", "gcc", "make", "libc6-dev", "pkg-config"):
        host.tree.package(name, "1")  # build tools are not taken away again
    host.tree.file("/etc/passwd", "root:x:0:0::/root:/bin/sh\nnvidia-persistenced:x:997:997::/:/usr/sbin/nologin\n")
    before = settings()
    host.converge()
    if loaded:
        host.world.kernel.load("nvidia")
    left = host.converge(DriverDesired(**{**vars(host.desired), "state": "absent"}))
    assert left.steps == []
    facts = gather(host.world)
    assert (facts.dkms, facts.module_versions, facts.driver_version) == ((), {}, "")
    # The firmware's folder goes with the installer's own list of files, which a double does not have.
    after = {path: text for path, text in settings().items() if "/firmware/" not in path}
    assert after == before


def test_looking_changes_nothing(host: Host) -> None:
    before = host.tree.snapshot()
    by_apt = DriverDesired(**{**vars(host.desired), "source": "apt", "packages": ("libcuda1",)})
    for desired in (host.desired, by_apt):
        host.plan(desired)
    assert host.tree.snapshot() == before


# -- the installer -----------------------------------------------------------------------------------------------------


def test_the_installer_is_believed_by_its_module(host: Host) -> None:
    host.take(INSTALL)
    assert host.module() == VERSION
    assert host.calls("sh")[-1][1:6] == [RUNFILE, "-s", "--dkms", "-M", "open"]


def test_an_installer_that_worked_and_ends_with_1_is_fine(host: Host) -> None:
    """Its status is 1 for a warning too; the module is there and of the right version."""
    host.status = 1
    host.take(INSTALL)
    assert host.module() == VERSION


@pytest.mark.parametrize(
    ("log", "advice"),
    [
        ("ERROR: The Nouveau kernel driver is currently in use by your system.\n", "nouveau blacklist"),
        (
            "ERROR: An NVIDIA kernel module 'nvidia-uvm' appears to already be loaded in your kernel.\n",
            "stop what uses",
        ),
        ("ERROR: Unable to find the kernel source tree for the currently running kernel.\n", "headers"),
        ("ERROR: Failed to run `/usr/sbin/dkms build`: Bad return status\n", "make.log"),
        ("ERROR: something nobody has seen before\n", "nobody has seen"),
    ],
)
def test_an_installer_that_aborts_is_quoted_with_the_way_on(host: Host, log: str, advice: str) -> None:
    """Row 30: luckyyyyy/blog#72, the list of aborts in silent mode."""
    host.abort = log
    with pytest.raises(ApplyError) as failure:
        host.take(INSTALL)
    told = str(failure.value)
    assert "there is no module" in told
    assert log.strip() in told
    assert advice in told


def test_an_installer_that_lies_is_found_out(host: Host) -> None:
    host.modules = False
    with pytest.raises(ApplyError, match="there is no module"):
        host.take(INSTALL)


def test_the_log_of_an_earlier_run_is_not_quoted(host: Host) -> None:
    host.tree.file(runfile.LOG, "ERROR: from last year\n")
    host.fails("sh", "no room on the device")
    with pytest.raises(ApplyError) as failure:
        host.take(INSTALL)
    assert "last year" not in str(failure.value)
    assert "no room on the device" in str(failure.value)


def test_a_module_of_another_version_is_named(host: Host) -> None:
    host.tree.driver(OLD)
    host.abort = "ERROR: no\n"
    with pytest.raises(ApplyError, match=f"the module is of {OLD}"):
        host.take(INSTALL)


def test_the_uninstaller_is_believed_by_its_absence(host: Host) -> None:
    host.take(INSTALL)
    host.take(Step("uninstall", runfile.UNINSTALLER, "test"))
    assert host.module() is None
    host.take(INSTALL)
    host.lies("nvidia-uninstall")
    with pytest.raises(ApplyError, match="still there"):
        host.take(Step("uninstall", runfile.UNINSTALLER, "test"))


# -- DKMS --------------------------------------------------------------------------------------------------------------


def test_dkms_builds_what_is_missing_and_only_that(host: Host) -> None:
    host.tree.driver(VERSION, kernels=())
    host.take(BUILD)
    host.take(BUILD)
    assert host.calls("dkms") == [["dkms", "install", f"nvidia/{VERSION}", "-k", KERNEL]]


def test_a_build_that_failed_is_quoted(host: Host) -> None:
    host.fails("dkms", "Error! Bad return status for module build on kernel: 6.17.2-1-pve")
    with pytest.raises(ApplyError, match="Bad return status"):
        host.take(BUILD)


def test_a_build_that_did_not_happen_is_an_error(host: Host) -> None:
    host.lies("dkms")
    with pytest.raises(ApplyError, match="modinfo shows no module"):
        host.take(BUILD)


def test_old_builds_are_removed_unless_they_are_gone_already(host: Host) -> None:
    host.tree.driver(OLD)
    host.take(Step("dkms-remove", OLD, "test"), Step("dkms-remove", "550.54.14", "test"))
    assert gather(host.world).dkms == ()
    assert [call for call in host.calls("dkms") if call[1] == "remove"] == [
        ["dkms", "remove", f"nvidia/{OLD}", "--all"]
    ]


def test_a_build_that_stays_is_an_error(host: Host) -> None:
    host.tree.driver(OLD)
    host.world.on("dkms", lambda world, argv: 0 if argv[1] == "remove" else None)
    with pytest.raises(ApplyError, match=f"still lists nvidia/{OLD}"):
        host.take(Step("dkms-remove", OLD, "test"))


# -- a loaded module ---------------------------------------------------------------------------------------------------


def test_the_daemon_is_stopped_before_the_module_is_unloaded(host: Host) -> None:
    """Row 17: it holds every card open."""
    host.load(OLD)
    host.take(UNLOAD)
    assert host.loaded() == ""
    stop, unload = host.calls("systemctl")[-1], host.calls("modprobe")[-1]
    assert stop == ["systemctl", "stop", PERSISTENCE_UNIT]
    assert unload == ["modprobe", "-r", "nvidia_uvm", "nvidia"]
    assert host.world.commands.index(stop) < host.world.commands.index(unload)


def test_a_module_that_stays_is_an_error_and_the_daemon_comes_back(host: Host) -> None:
    host.load(OLD)
    host.fails("modprobe", "modprobe: FATAL: Module nvidia is in use.")
    with pytest.raises(ApplyError, match=r"Module nvidia is in use.*nvidia_driver_reboot"):
        host.take(UNLOAD)
    assert host.world.answer(["systemctl", "is-active", PERSISTENCE_UNIT]).out == "active\n"


def test_a_later_failure_loads_the_old_module_again(host: Host) -> None:
    host.load(OLD)
    host.abort = "ERROR: no space\n"
    with pytest.raises(ApplyError, match="earlier steps were undone"):
        host.take(UNLOAD, INSTALL)
    assert host.loaded() == OLD
    assert host.world.answer(["systemctl", "is-active", PERSISTENCE_UNIT]).out == "active\n"


def test_a_module_is_loaded_by_the_kernels_own_word(host: Host) -> None:
    with pytest.raises(ApplyError, match="the driver is not there"):
        host.take(LOAD)
    host.tree.driver(VERSION)
    host.take(LOAD)
    assert host.loaded() == VERSION


def test_why_the_kernel_rejects_a_module_is_quoted(host: Host) -> None:
    """Row 26: `Key was rejected by service`."""
    host.fails("modprobe", "modprobe: ERROR: could not insert 'nvidia': Key was rejected by service")
    with pytest.raises(ApplyError, match="Key was rejected by service"):
        host.take(LOAD)


# -- kernels and packages ----------------------------------------------------------------------------------------------


def test_a_pin_is_marked_as_ours_and_taken_back_on_failure(host: Host) -> None:
    step = Step("pin-kernel", KERNEL, "test", {"undo": ["proxmox-boot-tool", "kernel", "unpin"]})
    host.abort = "ERROR: no\n"
    with pytest.raises(ApplyError):
        host.take(step, INSTALL)
    assert host.world.read(PIN_MARKER) is None
    assert gather(host.world).pinned_kernel == ""
    host.take(step)
    assert host.world.read(PIN_MARKER) == f"{KERNEL}\n"
    assert gather(host.world).pinned_kernel == KERNEL


def test_exact_packages_are_read_back_from_dpkg(host: Host) -> None:
    host.archive["libcuda1"] = ("580.173.02-1", f"{VERSION}-1")
    wanted = Step("apt-install", "packages", "test", {"packages": {"libcuda1": f"{VERSION}-1"}})
    host.take(wanted)
    assert host.tree.packages["libcuda1"] == f"{VERSION}-1"
    host.tree.package("libcuda1", "580.173.02-1")
    host.lies("apt-get")
    with pytest.raises(ApplyError, match=r"dpkg has libcuda1 580\.173\.02-1"):
        host.take(wanted)


def test_lists_of_packages_are_updated_once_when_a_name_is_unknown(host: Host) -> None:
    host.archive_after_update = {"libfuse2t64": ("1",)}
    host.take(Step("apt-install", "a package", "test", {"packages": {"libfuse2t64": ""}}))
    assert [call[1] for call in host.calls("apt-get")] == ["install", "update", "install"]


def test_removed_packages_are_looked_for(host: Host) -> None:
    host.tree.package("proxmox-headers-7.0", "7.0.2-1")
    step = Step("apt-remove", "headers", "test", {"packages": ["proxmox-headers-7.0"]})
    host.take(step)
    assert "proxmox-headers-7.0" not in host.tree.packages
    host.tree.package("proxmox-headers-7.0", "7.0.2-1")
    host.lies("apt-get")
    with pytest.raises(ApplyError, match=r"still has proxmox-headers-7\.0"):
        host.take(step)


def test_what_came_along_is_held_too(host: Host) -> None:
    for name in ("libcuda1", "libnvidia-gpucomp", "nvidia-container-toolkit"):
        host.tree.package(name, "1")
    step = Step("apt-hold", "packages", "test", {"packages": ["libcuda1"]})
    host.take(step)
    assert host.held == {"libcuda1", "libnvidia-gpucomp"}
    host.take(Step("apt-unhold", "packages", "test", {"packages": ["libcuda1", "libnvidia-gpucomp"]}))
    assert host.held == set()
    host.lies("apt-mark")
    with pytest.raises(ApplyError, match="no effect on libcuda1"):
        host.take(step)


# -- what is read ------------------------------------------------------------------------------------------------------


def test_the_state_is_read_from_the_host(host: Host) -> None:
    for name, version in (("dkms", "3"), ("gcc", "14"), ("libcuda1", "550.163.01-2"), ("libnvidia-container1", "1.17")):
        host.tree.package(name, version)
    host.archive["libcuda1"] = ("580.173.02-1", f"{VERSION}-1")
    host.held = {"libcuda1"}
    host.world.answer(["systemctl", "enable", PERSISTENCE_UNIT])
    host.tree.file(apt.PREFERENCES, "old\n").file("/run/double/mok", "")
    state = gather_state(
        host.world, DriverDesired(**{**vars(host.desired), "source": "apt", "packages": ("libcuda1",)})
    )
    assert state.distribution == "debian"
    assert set(state.tools) == {"dkms", "gcc"}
    assert state.packages == {"libcuda1": "550.163.01-2"}
    assert state.available == {"libcuda1": ("580.173.02-1", f"{VERSION}-1")}
    assert state.held == ("libcuda1",)
    assert (state.enabled, state.active) == ((PERSISTENCE_UNIT,), ())
    assert state.texts[apt.PREFERENCES] == "old\n"
    assert state.mok_enrolled
    assert not state.uninstaller
    assert state.users == ("root",)


def test_the_checksum_of_the_installer(tmp_path: Path) -> None:
    file = tmp_path / "x.run"
    file.write_bytes(b"abc")
    assert runfile.sha256_of(World(), str(file)) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert runfile.sha256_of(World(), str(tmp_path / "none.run")) is None
