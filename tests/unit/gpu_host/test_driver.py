"""Plans of the driver over hand-written facts: the refusals, the steps, and that a done host has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpu_host import apt
from gpu_host.driver import headers_package, plan
from gpu_host.driver_state import (
    HEADER_PREFERENCES,
    MODPROBE,
    MODPROBE_TEXT,
    PERSISTENCE_UNIT,
    PIN_MARKER,
    DriverDesired,
    DriverPlan,
    DriverState,
    ManagedFile,
)
from gpu_host.facts import Container, ContainerEntry, DkmsBuild, HostFacts, NvidiaGpu
from gpu_host.kernels import table_of, unfit_headers_pattern

VERSION, OLD = "580.126.09", "570.148.08"
KERNEL = "6.17.2-1-pve"
SUM = "4cac53e48f8adff661d47c8788ed24059a248c9fd8098ceafd088a498986ec26"
RUNFILE = f"/var/cache/drafthouse/NVIDIA-Linux-x86_64-{VERSION}.run"
NODES = "drafthouse-nvidia-nodes.service"
TOOLS = ("dkms", "gcc", "make", "libc6-dev", "pkg-config")
CARD = "0000:41:00.0"

BARE = HostFacts(
    hostname="kpro5",
    kernel=KERNEL,
    kernels=(KERNEL,),
    headers=(KERNEL,),
    header_packages=(f"proxmox-headers-{KERNEL}",),
    pve="9.1.1",
    secure_boot=False,
    init="systemd",
)
FILES = (ManagedFile(f"/etc/systemd/system/{NODES}", "[Unit]\n", unit=True),)
DESIRED = DriverDesired(version=VERSION, runfile=RUNFILE, sha256=SUM, files=FILES, units=(NODES, PERSISTENCE_UNIT))
EMPTY = DriverState(distribution="debian", free_mb=9000, runfile_sha256=SUM, tools=TOOLS)


def driven(facts: HostFacts = BARE, version: str = VERSION, loaded: bool = True) -> HostFacts:
    """The host with a driver on every kernel with headers."""
    kernels = sorted({facts.kernel, *facts.headers})
    return replace(
        facts,
        driver_version=version if loaded else "",
        driver_kind="open",
        module_versions=dict.fromkeys(kernels, version),
        dkms=tuple(DkmsBuild("nvidia", version, kernel, "installed") for kernel in kernels),
        firmware=(version,),
        gpus=(NvidiaGpu(CARD, 0, "RTX A6000", "GPU-a"),) if loaded else (),
    )


def texts(source: str = "runfile") -> dict[str, str | None]:
    known = table_of(VERSION)
    assert known is not None
    return {
        MODPROBE: MODPROBE_TEXT,
        apt.PREFERENCES: apt.preferences(VERSION if source == "apt" else None),
        apt.UNATTENDED: apt.unattended_blacklist(),
        HEADER_PREFERENCES: apt.header_preferences(unfit_headers_pattern(known)),
        PIN_MARKER: None,
        FILES[0].path: FILES[0].text,
    }


def settled(**changes: Any) -> DriverState:
    """What a host answers on which everything was done."""
    units = (NODES, PERSISTENCE_UNIT)
    done = replace(
        EMPTY, uninstaller=True, texts=texts(), enabled=units, active=units, users=("root", "nvidia-persistenced")
    )
    return replace(done, **changes)


def actions(made: DriverPlan) -> list[str]:
    return [step.action for step in made.steps]


def rules(made: DriverPlan) -> list[str]:
    return [refusal.rule for refusal in made.refusals]


def step(made: DriverPlan, action: str) -> Any:
    return next(s for s in made.steps if s.action == action)


# -- a first installation, and a second run ----------------------------------------------------------------------------


def test_a_bare_host_gets_files_then_the_installer_then_units() -> None:
    made = plan(BARE, EMPTY, DESIRED)
    assert not made.refused
    order = actions(made)
    assert order.index("runfile") > max(i for i, action in enumerate(order) if action == "write")
    written = {s.target for s in made.steps if s.action == "write"}
    assert written == {MODPROBE, apt.PREFERENCES, apt.UNATTENDED, HEADER_PREFERENCES, FILES[0].path}
    assert ["systemctl", "enable", NODES, PERSISTENCE_UNIT] in [s.detail.get("argv") for s in made.steps]
    assert made.wants_runfile
    assert not made.reboot


def test_the_installer_is_called_with_the_flags_that_own_nothing_of_ours() -> None:
    argv = step(plan(BARE, EMPTY, DESIRED), "runfile").detail["argv"]
    assert argv[:2] == ["sh", RUNFILE]
    assert set(argv) >= {"-s", "--dkms", "--skip-module-load", "--no-rebuild-initramfs", "--no-install-compat32-libs"}
    assert argv[argv.index("-M") + 1] == "open"
    assert "-m" not in argv
    assert "--allow-installation-with-running-driver" not in argv


def test_a_host_as_desired_has_an_empty_plan() -> None:
    made = plan(driven(), settled(), DESIRED)
    assert made.as_dict() == {
        "steps": [],
        "refusals": [],
        "notes": [],
        "reboot": "",
        "wants_runfile": False,
    }


def test_a_driver_that_is_installed_and_not_yet_loaded_is_as_desired() -> None:
    assert plan(driven(loaded=False), settled(active=()), DESIRED).steps == []


def test_units_that_ran_before_a_module_was_replaced_run_again() -> None:
    made = plan(replace(driven(), driver_version=OLD), settled(active=(PERSISTENCE_UNIT,)), DESIRED)
    assert [s.action for s in made.steps] == ["unload", "load", "run"]
    assert made.steps[-1].detail["argv"] == ["systemctl", "restart", PERSISTENCE_UNIT]


def test_the_initramfs_is_rebuilt_only_when_the_blacklist_changed() -> None:
    assert "initramfs" in [s.target for s in plan(BARE, EMPTY, DESIRED).steps]
    unit_only = {**texts(), FILES[0].path: "[Unit]\nold\n"}
    targets = [s.target for s in plan(driven(), settled(texts=unit_only), DESIRED).steps]
    assert targets == [FILES[0].path, "systemd"]


# -- evidence, not exit codes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"firmware": ()},  # row 18: ublue-os/bazzite#2668
        {"firmware": (OLD,)},
        {"module_versions": {KERNEL: OLD}},
        {"dkms": (DkmsBuild("nvidia", VERSION, KERNEL, "added"),)},
        {"dkms": (DkmsBuild("nvidia", VERSION, KERNEL, "built"),), "module_versions": {}},
    ],
)
def test_a_driver_that_lacks_a_piece_of_evidence_is_installed_again(changes: dict[str, Any]) -> None:
    made = plan(replace(driven(loaded=False), **changes), settled(), DESIRED)
    assert {"runfile", "dkms-install"} & set(actions(made))


def test_a_kernel_update_needs_dkms_and_no_installer() -> None:
    newer = "6.17.13-1-pve"
    host = replace(driven(loaded=False), kernel=newer, kernels=(KERNEL, newer), headers=(KERNEL, newer))
    made = plan(host, settled(), DESIRED)
    assert [(s.action, s.target) for s in made.steps] == [("dkms-install", newer)]
    assert not made.wants_runfile


def test_every_kernel_with_headers_gets_the_module() -> None:
    """Any of them may be the next to boot."""
    other = "6.14.8-2-pve"
    made = plan(replace(BARE, kernels=(other, KERNEL), headers=(other, KERNEL)), EMPTY, DESIRED)
    assert step(made, "runfile").detail["kernel"] == KERNEL
    assert step(made, "dkms-install").target == other


# -- the kernel gate (rows 1 to 6) -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["6.19.2-1-pve", "7.0.2-1-pve"])
def test_a_running_kernel_that_does_not_fit_is_refused_with_both_ways_out(kernel: str) -> None:
    made = plan(replace(BARE, kernel=kernel, kernels=(KERNEL, kernel), headers=()), EMPTY, DESIRED)
    refusal = next(r for r in made.refusals if r.rule == "kernel-unfit")
    assert f"proxmox-boot-tool kernel pin {KERNEL}" in refusal.fix
    assert "580.159.04" in refusal.fix
    assert "nvidia_driver_pin_kernel" in refusal.fix
    assert kernel in refusal.what
    assert not made.changed


def test_debians_driver_on_a_newer_kernel_is_refused() -> None:
    """Row 4: NVIDIA/open-gpu-kernel-modules#1143."""
    made = plan(replace(BARE, kernel="6.17.13-1-pve"), EMPTY, replace(DESIRED, version="550.163.01"))
    assert "kernel-unfit" in rules(made)


def test_an_unknown_driver_is_refused_before_anything_else() -> None:
    made = plan(BARE, EMPTY, replace(DESIRED, version="470.256.02"))
    assert rules(made) == ["no-kernel-range"]
    assert made.steps == []


def test_a_kernel_is_pinned_where_that_is_allowed() -> None:
    """Row 5: wvthoog/proxmox-vgpu-installer#6."""
    host = replace(BARE, kernel="7.0.2-1-pve", kernels=(KERNEL, "7.0.2-1-pve"))
    made = plan(host, EMPTY, replace(DESIRED, pin_kernel=True))
    assert not made.refused
    assert step(made, "pin-kernel").target == KERNEL
    assert step(made, "pin-kernel").detail["undo"] == ["proxmox-boot-tool", "kernel", "unpin"]
    assert "7.0.2-1-pve" in made.reboot
    assert "runfile" not in actions(made)
    after = plan(replace(host, pinned_kernel=KERNEL), settled(), replace(DESIRED, pin_kernel=True))
    assert after.steps == []
    assert after.reboot


def test_a_kernel_that_somebody_pinned_only_waits_for_its_boot() -> None:
    kernels = ("6.14.8-2-pve", KERNEL, "7.0.2-1-pve")
    host = replace(BARE, kernel="7.0.2-1-pve", kernels=kernels, pinned_kernel="6.14.8-2-pve")
    made = plan(host, EMPTY, DESIRED)
    assert not made.refused
    assert "pin-kernel" not in actions(made)
    assert "6.14.8-2-pve, which is pinned" in made.reboot


def test_modules_of_the_other_kind_are_noted() -> None:
    made = plan(replace(driven(), driver_kind="proprietary"), settled(), DESIRED)
    assert made.steps == []
    assert "proprietary" in made.notes[0]


def test_the_kernel_of_the_next_boot_is_judged_too() -> None:
    host = replace(driven(), kernels=(KERNEL, "7.0.2-1-pve"))
    made = plan(host, settled(), DESIRED)
    assert rules(made) == ["next-kernel-unfit"]
    assert "7.0.2-1-pve" in made.refusals[0].what
    assert plan(replace(host, pinned_kernel=KERNEL), settled(), DESIRED).steps == []
    pinned = plan(host, settled(), replace(DESIRED, pin_kernel=True))
    assert [(s.action, s.target) for s in pinned.steps] == [("pin-kernel", KERNEL)]


def test_headers_of_unfit_kernels_are_removed_and_kept_away() -> None:
    """Row 6: strongtz/i915-sriov-dkms#196, a build in a kernel's post-installation leaves dpkg half-configured."""
    names = (
        f"proxmox-headers-{KERNEL}",
        "proxmox-headers-7.0",
        "proxmox-headers-7.0.2-1-pve",
        "proxmox-default-headers",
    )
    host = replace(
        BARE,
        kernels=(KERNEL, "7.0.2-1-pve"),
        headers=(KERNEL, "7.0.2-1-pve"),
        header_packages=names,
        pinned_kernel=KERNEL,
    )
    made = plan(host, EMPTY, DESIRED)
    assert not made.refused
    assert step(made, "apt-remove").detail["packages"] == [
        "proxmox-default-headers",
        "proxmox-headers-7.0",
        "proxmox-headers-7.0.2-1-pve",
    ]
    assert actions(made).index("write") < actions(made).index("apt-remove") < actions(made).index("runfile")
    assert "dkms-install" not in actions(made)


def test_unfit_headers_without_a_package_are_refused() -> None:
    host = replace(BARE, headers=(KERNEL, "7.0.2-custom"), kernels=(KERNEL, "7.0.2-custom"), pinned_kernel=KERNEL)
    made = plan(host, EMPTY, DESIRED)
    assert rules(made) == ["headers-unfit"]
    assert made.refusals[0].where == "/lib/modules/7.0.2-custom/build"


def test_headers_follow_the_running_kernel_by_name() -> None:
    assert headers_package(KERNEL, proxmox=True) == "proxmox-headers-6.17.2-1-pve"
    assert headers_package("6.12.48+deb13-amd64", proxmox=False) == "linux-headers-6.12.48+deb13-amd64"
    made = plan(replace(BARE, headers=(), header_packages=()), replace(EMPTY, tools=("gcc", "make")), DESIRED)
    wanted = step(made, "apt-install").detail["packages"]
    assert set(wanted) == {f"proxmox-headers-{KERNEL}", "dkms", "libc6-dev", "pkg-config"}
    assert actions(made).index("apt-install") < actions(made).index("runfile")


# -- nouveau, a loaded module, Secure Boot -----------------------------------------------------------------------------


def test_nouveau_is_blacklisted_and_the_installer_waits_for_the_reboot() -> None:
    """Row 30: the installer aborts while nouveau drives a card."""
    made = plan(replace(BARE, modules=("nouveau",)), EMPTY, DESIRED)
    assert not made.refused
    assert "runfile" not in actions(made)
    assert MODPROBE in [s.target for s in made.steps]
    assert "initramfs" in [s.target for s in made.steps]
    assert "nouveau" in made.reboot
    again = plan(replace(BARE, modules=("nouveau",)), settled(), DESIRED)
    assert again.steps == []
    assert again.reboot


def test_a_stale_module_that_nothing_uses_is_replaced_in_place() -> None:
    """Rows 13, 14, 17: a point release must match, and the daemon must not hold the old module."""
    host = replace(driven(version=OLD), users={CARD: ("812 nvidia-persistenced",)})
    made = plan(host, settled(), DESIRED)
    assert not made.refused
    order = actions(made)
    assert order.index("unload") < order.index("runfile") < order.index("dkms-remove") < order.index("load")
    assert step(made, "unload").detail == {"persistenced": True}
    assert step(made, "dkms-remove").target == OLD
    assert not made.reboot


def test_a_module_that_is_right_on_disk_and_stale_in_memory_is_loaded_again() -> None:
    """Row 17: stackhpc/ansible-slurm-appliance#287."""
    made = plan(replace(driven(), driver_version=OLD), settled(), DESIRED)
    assert actions(made) == ["unload", "load", "run"]


def test_a_driver_in_use_is_refused_with_its_users() -> None:
    host = replace(driven(version=OLD), users={CARD: ("4711 python3", "812 nvidia-persistenced")})
    made = plan(host, settled(), DESIRED)
    assert "driver-in-use" in rules(made)
    refusal = made.refusals[rules(made).index("driver-in-use")]
    assert "4711 python3" in refusal.what
    assert "persistenced" not in refusal.what
    assert "nvidia_driver_reboot" in refusal.fix
    assert not made.changed


def test_a_driver_in_use_is_installed_beside_where_a_reboot_is_allowed() -> None:
    host = replace(driven(version=OLD), users={CARD: ("4711 python3",)})
    made = plan(host, settled(), replace(DESIRED, reboot=True))
    assert not made.refused
    assert "unload" not in actions(made)
    assert "load" not in actions(made)
    assert "--allow-installation-with-running-driver" in step(made, "runfile").detail["argv"]
    assert OLD in made.reboot
    done = replace(driven(), driver_version=OLD, users=host.users)
    again = plan(done, settled(), replace(DESIRED, reboot=True))
    assert again.steps == []
    assert again.reboot


def test_secure_boot_stops_with_instructions() -> None:
    """Row 26: awesometic/realtek-r8126-dkms#3."""
    made = plan(replace(BARE, secure_boot=True), EMPTY, DESIRED)
    assert rules(made) == ["secure-boot"]
    assert "mokutil --import /var/lib/dkms/mok.pub" in made.refusals[0].fix
    assert "Enroll MOK" in made.refusals[0].fix
    assert "switch Secure Boot off" in made.refusals[0].fix


def test_secure_boot_with_an_enrolled_key_goes_on() -> None:
    made = plan(replace(BARE, secure_boot=True), replace(EMPTY, mok_enrolled=True), DESIRED)
    assert not made.refused
    assert "runfile" in actions(made)
    assert plan(replace(driven(), secure_boot=True), settled(), DESIRED).as_dict()["refusals"] == []


# -- the installer's file and the other way of installation ------------------------------------------------------------


def test_a_missing_installer_is_refused_unless_it_is_on_its_way() -> None:
    made = plan(BARE, replace(EMPTY, runfile_sha256=None), DESIRED)
    assert rules(made) == ["no-runfile"]
    assert "nvidia_driver_cache" in made.refusals[0].fix
    assert not plan(BARE, replace(EMPTY, runfile_sha256=None), DESIRED, runfile_coming=True).refused


def test_an_installer_with_another_checksum_is_not_run() -> None:
    made = plan(BARE, replace(EMPTY, runfile_sha256="0" * 64), DESIRED)
    assert rules(made) == ["runfile-checksum"]
    assert "0" * 64 in made.refusals[0].what
    assert not plan(BARE, EMPTY, replace(DESIRED, sha256=SUM.upper())).refused


def test_a_done_host_does_not_need_the_installer() -> None:
    assert not plan(driven(), settled(runfile_sha256=None), DESIRED).refused


def test_packages_and_installer_are_not_mixed() -> None:
    state = replace(EMPTY, packages={"nvidia-kernel-dkms": "550.163.01-2"})
    made = plan(BARE, state, DESIRED)
    assert rules(made) == ["packaged-driver"]
    assert "nvidia-kernel-dkms 550.163.01-2" in made.refusals[0].what
    other = plan(BARE, replace(EMPTY, uninstaller=True), replace(DESIRED, source="apt", packages=("libcuda1",)))
    assert "runfile-driver" in rules(other)


def test_all_refusals_come_at_once() -> None:
    host = replace(BARE, kernel="7.0.2-1-pve", secure_boot=True)
    made = plan(host, replace(EMPTY, packages={"libcuda1": "550.163.01-2"}), DESIRED)
    assert set(rules(made)) >= {"kernel-unfit", "secure-boot", "packaged-driver"}
    assert len(made.refusal_text().splitlines()) == len(made.refusals)


# -- apt ---------------------------------------------------------------------------------------------------------------

PACKAGES = ("nvidia-kernel-open-dkms", "libcuda1")
BY_APT = replace(DESIRED, source="apt", packages=PACKAGES)
EXACT = dict.fromkeys(PACKAGES, f"{VERSION}-1")


def test_exact_packages_are_named_with_their_version_and_held() -> None:
    state = replace(EMPTY, available=dict.fromkeys(PACKAGES, (f"{VERSION}-1", "580.65.06-1")))
    made = plan(BARE, state, BY_APT)
    assert not made.refused
    assert step(made, "apt-install").detail["packages"] == EXACT
    assert step(made, "apt-hold").detail["packages"] == sorted(PACKAGES)
    assert "runfile" not in actions(made)
    assert not made.wants_runfile


def test_a_version_that_the_archive_dropped_is_refused_with_what_is_there() -> None:
    state = replace(EMPTY, available={"libcuda1": ("580.173.02-1",)})
    made = plan(BARE, state, BY_APT)
    assert rules(made) == ["no-exact-version", "no-exact-version"]
    told = made.refusal_text()
    assert "580.173.02-1" in told
    assert "no version of it" in told


def test_a_host_by_apt_as_desired_has_an_empty_plan() -> None:
    state = settled(uninstaller=False, texts=texts("apt"), packages=EXACT, held=PACKAGES)
    assert plan(driven(), state, BY_APT).steps == []


def test_a_package_that_unattended_upgrades_moved_is_brought_back() -> None:
    """Row 16: lyulyul/shine-cluster#30."""
    available = dict.fromkeys(PACKAGES, (f"{VERSION}-1", "580.173.02-1"))
    moved = {**EXACT, "libcuda1": "580.173.02-1"}
    made = plan(driven(), settled(texts=texts("apt"), packages=moved, available=available, held=PACKAGES), BY_APT)
    assert step(made, "apt-install").detail["packages"] == EXACT


def test_a_package_of_another_version_beside_is_refused() -> None:
    packages = {**EXACT, "libnvidia-ml1": "580.178.04-1"}
    made = plan(driven(), settled(texts=texts("apt"), packages=packages, held=(*PACKAGES, "libnvidia-ml1")), BY_APT)
    assert rules(made) == ["foreign-version"]
    assert "libnvidia-ml1 580.178.04-1" in made.refusals[0].what


def test_an_unknown_distribution_needs_the_packages_named() -> None:
    made = plan(BARE, replace(EMPTY, distribution="arch"), replace(BY_APT, packages=()))
    assert "unknown-distribution" in rules(made)


# -- machines whose driver is somebody else's --------------------------------------------------------------------------

VERIFY = replace(DESIRED, state="verified", minimum="580.65.06")


def test_a_rented_node_is_looked_at_and_not_touched() -> None:
    rented = HostFacts(virtualization="docker", init="bash", driver_version="580.95.05", kernel="7.0.9-generic")
    assert plan(rented, DriverState(), VERIFY).as_dict()["steps"] == []
    assert not plan(rented, DriverState(), VERIFY).refused


@pytest.mark.parametrize(("version", "rule"), [("", "no-driver"), ("570.148.08", "driver-too-old")])
def test_a_rented_node_without_a_fitting_driver_is_refused(version: str, rule: str) -> None:
    made = plan(HostFacts(virtualization="docker", driver_version=version), DriverState(), VERIFY)
    assert rules(made) == [rule]


@pytest.mark.parametrize("virtualization", ["docker", "lxc"])
def test_nothing_is_installed_in_a_container(virtualization: str) -> None:
    made = plan(replace(BARE, virtualization=virtualization), EMPTY, DESIRED)
    assert rules(made) == ["not-our-kernel"]
    assert made.steps == []


# -- the way back ------------------------------------------------------------------------------------------------------

GONE = replace(DESIRED, state="absent")


def test_reset_removes_all_that_was_installed() -> None:
    state = settled(texts={**texts(), PIN_MARKER: f"{KERNEL}\n"})
    made = plan(replace(driven(), pinned_kernel=KERNEL), state, GONE)
    assert not made.refused
    assert {"unload", "uninstall", "dkms-remove"} <= set(actions(made))
    removed = {s.target for s in made.steps if s.action == "remove"}
    assert removed == {*texts(), PIN_MARKER}
    commands = [s.detail.get("argv") for s in made.steps]
    assert ["systemctl", "disable", "--now", NODES, PERSISTENCE_UNIT] in commands
    assert ["proxmox-boot-tool", "kernel", "unpin"] in commands


def test_reset_of_a_bare_host_does_nothing() -> None:
    assert plan(BARE, replace(EMPTY, texts=dict.fromkeys(texts())), GONE).steps == []


def test_reset_leaves_a_pin_that_is_not_ours() -> None:
    made = plan(replace(BARE, pinned_kernel=KERNEL), replace(EMPTY, texts=dict.fromkeys(texts())), GONE)
    assert made.steps == []


def test_reset_releases_holds_before_it_purges() -> None:
    state = settled(uninstaller=False, packages=EXACT, held=(*PACKAGES, "zfs"), texts=texts("apt"))
    made = plan(driven(loaded=False), state, replace(GONE, source="apt"))
    assert step(made, "apt-unhold").detail["packages"] == sorted(PACKAGES)
    assert actions(made).index("apt-unhold") < actions(made).index("apt-remove")


def test_reset_refuses_while_a_container_has_the_cards() -> None:
    entries = (ContainerEntry("dev0", "/dev/nvidia0,mode=0666", "/dev/nvidia0"),)
    made = plan(replace(driven(), containers=(Container(129, running=True, entries=entries),)), settled(), GONE)
    assert rules(made) == ["container-has-gpu"]
    assert "pct shutdown 129" in made.refusals[0].fix


def test_a_full_disk_is_refused_before_the_installer_runs() -> None:
    made = plan(BARE, replace(EMPTY, free_mb=1700), DESIRED)
    assert rules(made) == ["no-space"]
    assert "1700 MB are free, the installer needs 1800" in made.refusal_text()
    assert not plan(BARE, replace(EMPTY, free_mb=1800), DESIRED).refused
    assert not plan(driven(), settled(free_mb=0), DESIRED).refused, "nothing is installed"
