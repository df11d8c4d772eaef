"""The kernel driver of a GPU host: exactly one version, on every kernel that could boot, and nothing half-built.

`plan(facts, state, desired)` is pure. `HostFacts` says what the machine is; `DriverState` adds what only this
planner asks for. The module of the running kernel is installed here and loaded where the cards are freed, so nothing
here needs a GPU that is bound.
"""

from __future__ import annotations

from . import apt, runfile
from .boot_files import initramfs_step
from .driver_kernel import judge_headers, judge_kernel, judge_secure_boot, kernels_to_serve
from .driver_removal import plan_removal
from .driver_state import (
    BUILD_TOOLS,
    MODPROBE,
    PERSISTENCE_UNIT,
    DriverDesired,
    DriverPlan,
    DriverState,
    owned_files,
    reload_step,
    wanted_packages,
)
from .facts import CONTAINERS, HostFacts
from .kernels import KernelRange, table_of, unknown_driver, version_key
from .steps import Refusal, Step
from .users import PERSISTENCED, gpu_users


def plan(facts: HostFacts, state: DriverState, desired: DriverDesired, runfile_coming: bool = False) -> DriverPlan:
    """What to do, or why not.

    Args:
        runfile_coming: the installer is put on the host, checksum and all, before the steps run.
    """
    if desired.state == "verified":
        return _verify(facts, desired)
    if desired.state == "absent":
        return plan_removal(facts, state, desired)
    return _install(facts, state, desired, runfile_coming)


# -- verified ----------------------------------------------------------------------------------------------------------


def _verify(facts: HostFacts, desired: DriverDesired) -> DriverPlan:
    return DriverPlan(refusals=loaded_refusals(facts.driver_version, desired.minimum or desired.version))


def loaded_refusals(loaded: str, minimum: str) -> list[Refusal]:
    """Why the driver that somebody else's host has loaded will not do.

    Args:
        loaded: its version, empty when none is loaded.
    """
    if not loaded:
        return [
            Refusal(
                "no-driver",
                "no NVIDIA driver is loaded, and this machine cannot load one",
                "/proc/driver/nvidia/version",
                "start it with its GPUs (`docker run --gpus all`, or the provider's GPU image), or rent another",
            )
        ]
    if version_key(loaded) < version_key(minimum):
        return [
            Refusal(
                "driver-too-old",
                f"the host's driver is {loaded}, at least {minimum} is needed",
                "/proc/driver/nvidia/version",
                "rent a node with a newer driver, or lower nvidia_driver_minimum if the workload's CUDA allows it",
            )
        ]
    return []


# -- present -----------------------------------------------------------------------------------------------------------


def _install(facts: HostFacts, state: DriverState, desired: DriverDesired, runfile_coming: bool) -> DriverPlan:
    made = DriverPlan()
    if facts.rented or facts.virtualization in CONTAINERS:
        made.refusals.append(
            Refusal(
                "not-our-kernel",
                f"this machine runs in {facts.virtualization}, its kernel and driver belong to its host",
                "nvidia_driver_verify_only",
                "set it to true to check the host's driver, or provision the host itself",
            )
        )
        return made
    known = table_of(desired.version, desired.kernels)
    if known is None:
        made.refusals.append(unknown_driver(desired.version, "nvidia_driver_version"))
        return made

    target = judge_kernel(facts, desired, known, made)
    judge_headers(facts, desired, known, made)
    _mixture(state, desired, made)
    if desired.source == "runfile" and facts.driver_kind not in ("", desired.kind):
        made.notes.append(
            f"the loaded modules are {facts.driver_kind}, not {desired.kind}; reset.yml and site.yml change it"
        )
    complete = _complete(facts, state, desired, known)
    if facts.driver_version != desired.version:
        judge_secure_boot(facts, state, made)
    _files(state, desired, made)
    if target != facts.kernel:
        made.reboot = f"the host runs {facts.kernel}; driver {desired.version} is built for {target}, which is pinned"
        return made

    packages = _build_packages(facts, state, target)
    if packages:
        why = f"DKMS builds for the running kernel {target}"
        made.steps.append(Step("apt-install", "build tools", why, {"packages": dict.fromkeys(packages, "")}))
    if "nouveau" in facts.modules and not facts.driver_version:
        made.reboot = "nouveau drives a card and leaves only with a reboot; the NVIDIA driver is installed after it"
        return made

    if not complete:
        _driver(facts, state, desired, known, made, runfile_coming)
    if desired.source == "apt":
        loose = sorted({*wanted_packages(state.distribution, desired), *state.packages} - set(state.held))
        if loose:
            why = "no upgrade moves one of them alone"
            made.steps.append(Step("apt-hold", "the driver's packages", why, {"packages": loose}))
    _units(state, desired, made)
    return made


def _mixture(state: DriverState, desired: DriverDesired, made: DriverPlan) -> None:
    """One way of installation on a host: the other one's files would be overwritten under its feet."""
    if desired.source == "runfile" and state.packages:
        there = ", ".join(f"{name} {version}" for name, version in sorted(state.packages.items()))
        made.refusals.append(
            Refusal(
                "packaged-driver",
                f"packages of the driver are installed ({there}) and the .run file would overwrite their files",
                "dpkg",
                "either purge them (playbooks/reset.yml, nvidia_driver_source: apt), or set nvidia_driver_source: apt",
            )
        )
    if desired.source == "apt" and state.uninstaller and not state.packages:
        made.refusals.append(
            Refusal(
                "runfile-driver",
                "a .run installation is on this host, and packages would be laid over it",
                runfile.UNINSTALLER,
                "either remove it (playbooks/reset.yml with nvidia_driver_source: runfile), "
                "or set nvidia_driver_source: runfile",
            )
        )


def _build_packages(facts: HostFacts, state: DriverState, kernel: str) -> list[str]:
    missing = [name for name in BUILD_TOOLS if name not in state.tools]
    if kernel not in facts.headers:
        missing.append(headers_package(kernel, bool(facts.pve)))
    return missing


def headers_package(kernel: str, proxmox: bool) -> str:
    """The package whose name follows the running kernel; metapackages follow the default kernel instead."""
    return f"{'proxmox' if proxmox else 'linux'}-headers-{kernel}"


def _built(facts: HostFacts, kernel: str, version: str) -> bool:
    on_disk = facts.module_versions.get(kernel) == version
    registered = any(
        b.module.startswith("nvidia") and b.version == version and b.kernel == kernel and b.state == "installed"
        for b in facts.dkms
    )
    return on_disk and registered


def _complete(facts: HostFacts, state: DriverState, desired: DriverDesired, known: KernelRange) -> bool:
    """Evidence that the driver is installed as desired, whatever any installer said."""
    kernels = kernels_to_serve(facts, known)
    return (
        all(_built(facts, kernel, desired.version) for kernel in kernels)
        and desired.version in facts.firmware
        and facts.driver_version in ("", desired.version)
        and not _other_builds(facts, desired.version)
        and (desired.source != "apt" or not _packages_astray(state, desired))
    )


def _other_builds(facts: HostFacts, version: str) -> list[str]:
    return sorted({b.version for b in facts.dkms if b.module == "nvidia" and b.version != version})


def _packages_astray(state: DriverState, desired: DriverDesired) -> list[str]:
    return apt.astray(wanted_packages(state.distribution, desired), state.packages, desired.version)


def _driver(
    facts: HostFacts,
    state: DriverState,
    desired: DriverDesired,
    known: KernelRange,
    made: DriverPlan,
    runfile_coming: bool,
) -> None:
    """Everything between another driver, or none, and this one."""
    version = desired.version
    stale = bool(facts.driver_version) and facts.driver_version != version
    beside = stale and _leave_loaded(facts, desired, made)
    if stale and not beside:
        why = f"{facts.driver_version} is loaded and {version} is wanted"
        made.steps.append(Step("unload", "nvidia", why, {"persistenced": PERSISTENCE_UNIT in state.active}))

    kernels = kernels_to_serve(facts, known)
    registered = any(b.module == "nvidia" and b.version == version for b in facts.dkms)
    whole = registered and version in facts.firmware
    if desired.source == "apt":
        _packages(state, desired, made)
    elif not whole:
        _runfile(facts, state, desired, made, runfile_coming, beside)
    for kernel in kernels:
        if not _built(facts, kernel, version) and (whole or kernel != facts.kernel):
            why = f"the module of {kernel} is missing"
            made.steps.append(Step("dkms-install", kernel, why, {"version": version}))
    for other in _other_builds(facts, version):
        made.steps.append(Step("dkms-remove", other, f"only {version} is to be built from now on"))
    if stale and not beside:
        made.steps.append(Step("load", "nvidia", "it was loaded before", {"version": version}))
    if beside:
        made.reboot = f"{facts.driver_version} stays loaded until the reboot, {version} is installed"


def _leave_loaded(facts: HostFacts, desired: DriverDesired, made: DriverPlan) -> bool:
    """Whether the loaded driver is left in place for a reboot, because something uses it."""
    busy = gpu_users(facts)
    if not busy:
        return False
    if not desired.reboot:
        who = ", ".join(f"{address}: {' '.join(names)}" for address, names in sorted(busy.items()))
        made.refusals.append(
            Refusal(
                "driver-in-use",
                f"driver {facts.driver_version} is loaded and in use ({who}); {desired.version} cannot replace it",
                "/proc/driver/nvidia/version",
                "either stop these (for a container: `pct shutdown`) and run this again, or set "
                "nvidia_driver_reboot: true to install beside it and reboot",
            )
        )
    return True


def _runfile(
    facts: HostFacts,
    state: DriverState,
    desired: DriverDesired,
    made: DriverPlan,
    runfile_coming: bool,
    beside: bool,
) -> None:
    if not runfile_coming:
        made.refusals += runfile.refusals(desired.runfile, desired.sha256, state.runfile_sha256)
    made.refusals += runfile.space_refusals(
        state.free_mb,
        runfile.LIBRARIES_MB + runfile.MODULES_MB,
        "free space (old kernels: `apt autoremove`; packages: `apt clean`), or enlarge the root file system",
    )
    made.wants_runfile = True
    argv = runfile.host_arguments(desired.runfile, desired.kind, beside)
    why = f"driver {desired.version} with {desired.kind} kernel modules through DKMS for {facts.kernel}"
    made.steps.append(
        Step("runfile", desired.runfile, why, {"argv": argv, "version": desired.version, "kernel": facts.kernel})
    )


def _packages(state: DriverState, desired: DriverDesired, made: DriverPlan) -> None:
    wanted = wanted_packages(state.distribution, desired)
    if not wanted:
        made.refusals.append(apt.unknown_distribution(state.distribution, "nvidia_driver_packages"))
        return
    steps, refusals = apt.plan_packages(wanted, state.packages, state.available, desired.version)
    made.steps += steps
    made.refusals += refusals


def _files(state: DriverState, desired: DriverDesired, made: DriverPlan) -> None:
    """Files first: apt's preferences must stand before apt runs, the blacklist before the driver."""
    changed = [file for path, file in owned_files(desired).items() if state.texts.get(path) != file.text]
    made.steps[:0] = [Step("write", f.path, f.why, {"text": f.text, "mode": f.mode}) for f in changed]
    if any(file.path == MODPROBE for file in changed):
        made.steps.append(initramfs_step("the initramfs carries the nouveau blacklist"))
    if any(file.unit for file in changed):
        made.steps.append(reload_step())


def _units(state: DriverState, desired: DriverDesired, made: DriverPlan) -> None:
    if desired.source == "runfile" and PERSISTENCE_UNIT in desired.units and PERSISTENCED not in state.users:
        argv = ["useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", PERSISTENCED]
        made.steps.append(Step("run", PERSISTENCED, "the daemon runs as this user", {"argv": argv}))
    asleep = [unit for unit in desired.units if unit not in state.enabled]
    if asleep:
        undo = ["systemctl", "disable", *asleep]
        detail = {"argv": ["systemctl", "enable", *asleep], "undo": undo}
        made.steps.append(Step("run", " ".join(asleep), "starts with the host", detail))
    if state.active and any(step.action == "load" for step in made.steps):
        argv = ["systemctl", "restart", *state.active]
        why = "it ran before the module was replaced"
        made.steps.append(Step("run", " ".join(state.active), why, {"argv": argv, "timeout_s": 300}))
