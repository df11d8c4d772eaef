"""The way back of the driver: nothing of it on the host, and the kernel pinned for it free again."""

from __future__ import annotations

from . import runfile
from .boot_files import initramfs_step
from .driver_state import (
    MODPROBE,
    PIN_MARKER,
    DriverDesired,
    DriverPlan,
    DriverState,
    owned_files,
    reload_step,
)
from .facts import HostFacts
from .steps import Refusal, Step
from .users import gpu_users


def plan_removal(facts: HostFacts, state: DriverState, desired: DriverDesired) -> DriverPlan:
    """Steps that remove the driver however it was installed, or who still uses it."""
    made = DriverPlan()
    busy = gpu_users(facts)
    running = [c for c in facts.containers if c.running and any(e.path.startswith("/dev/nvidia") for e in c.entries)]
    for container in running:
        made.refusals.append(
            Refusal(
                "container-has-gpu",
                f"container {container.vmid} runs with devices of the driver",
                container.file or f"container {container.vmid}",
                f"either take its GPUs away (reset of lxc_gpu), or stop it (`pct shutdown {container.vmid}`)",
            )
        )
    if busy and not running:
        who = ", ".join(f"{address}: {' '.join(names)}" for address, names in sorted(busy.items()))
        made.refusals.append(
            Refusal("driver-in-use", f"the driver is in use ({who})", "/dev/nvidia*", "stop these, or reboot, first")
        )
    on = [unit for unit in desired.units if unit in state.enabled or unit in state.active]
    if on:
        argv = ["systemctl", "disable", "--now", *on]
        made.steps.append(Step("run", " ".join(on), "nothing to drive any more", {"argv": argv, "timeout_s": 120}))
    if facts.driver_version:
        made.steps.append(Step("unload", "nvidia", "the driver goes away", {"persistenced": False}))
    if state.held and set(state.held) & set(state.packages):
        names = sorted(set(state.held) & set(state.packages))
        made.steps.append(Step("apt-unhold", "the driver's packages", "they go away", {"packages": names}))
    if state.packages:
        names = sorted(state.packages)
        made.steps.append(Step("apt-remove", "the driver's packages", "the way back", {"packages": names}))
    if state.uninstaller:
        made.steps.append(Step("uninstall", runfile.UNINSTALLER, "the way back", {}))
    for version in sorted({b.version for b in facts.dkms if b.module == "nvidia"}):
        made.steps.append(Step("dkms-remove", version, "the way back"))
    files = owned_files(desired)
    present = [path for path in files if state.texts.get(path) is not None]
    made.steps += [Step("remove", path, "owned by the role") for path in present]
    if MODPROBE in present:
        made.steps.append(initramfs_step("the nouveau blacklist leaves the initramfs"))
    if any(files[path].unit for path in present):
        made.steps.append(reload_step())
    pinned = (state.texts.get(PIN_MARKER) or "").strip()
    if pinned:
        if facts.pinned_kernel == pinned:
            undo = ["proxmox-boot-tool", "kernel", "pin", pinned]
            detail = {"argv": ["proxmox-boot-tool", "kernel", "unpin"], "undo": undo}
            made.steps.append(Step("run", pinned, "pinned for the driver", detail))
        made.steps.append(Step("remove", PIN_MARKER, "owned by the role"))
    return made
