"""How the steps of the driver's plan are taken, each proven by what the host says afterwards."""

from __future__ import annotations

from . import apt, runfile
from .apply import Undo
from .driver_state import PERSISTENCE_UNIT, PIN_MARKER
from .steps import ApplyError, Step
from .world import World

#: Unloaded in this order: a module leaves after those that use it.
MODULES = ("nvidia_uvm", "nvidia_drm", "nvidia_modeset", "nvidia_peermem", "nvidia")


def _module_version(world: World, kernel: str) -> str:
    return world.run(["modinfo", "-k", kernel, "-F", "version", "nvidia"]).out.strip()


def run_installer(step: Step, world: World) -> Undo | None:
    """`runfile`: the installer ran and the module of `detail['kernel']` has `detail['version']`.

    Its exit status is not asked: it is 1 for an abort that changed nothing and for a build that failed half-way, and
    0 does not prove that DKMS installed the module. There is no way back: what it replaced is gone.
    """
    kernel, version = step.detail["kernel"], step.detail["version"]
    world.remove(runfile.LOG)
    result = world.run(step.detail["argv"], runfile.TIMEOUT_S)
    found = _module_version(world, kernel)
    if found != version:
        has = f"the module is of {found}" if found else "there is no module"
        said = runfile.reason(world) if world.exists(runfile.LOG) else result.tail()
        raise ApplyError(f"the installer ended with {result.rc} and {has} for {kernel}: {said}")
    return None


def dkms_install(step: Step, world: World) -> Undo | None:
    """`dkms-install`: the module of kernel `target` is built and installed."""
    kernel, version = step.target, step.detail["version"]
    if _module_version(world, kernel) == version:
        return None  # An installer or a package of this plan did it already.
    world.must(["dkms", "install", f"nvidia/{version}", "-k", kernel], runfile.TIMEOUT_S)
    found = _module_version(world, kernel)
    if found != version:
        raise ApplyError(f"dkms reported success, but modinfo shows {found or 'no module'} for {kernel}")
    return None


def dkms_remove(step: Step, world: World) -> Undo | None:
    """`dkms-remove`: version `target` is built no more; an uninstaller may have done it already."""
    name = f"nvidia/{step.target}"

    def listed() -> bool:
        return step.target in world.run(["dkms", "status", name]).out

    if listed():
        world.must(["dkms", "remove", name, "--all"], 600)
        if listed():
            raise ApplyError(f"dkms reported success, but still lists {name}")
    return None


def unload(step: Step, world: World) -> Undo | None:
    """`unload`: no NVIDIA module is loaded; the persistence daemon, which holds every card, is stopped first."""

    def back() -> None:
        world.must(["modprobe", "nvidia"])
        if step.detail["persistenced"]:
            world.must(["systemctl", "start", PERSISTENCE_UNIT])

    if step.detail["persistenced"]:
        world.must(["systemctl", "stop", PERSISTENCE_UNIT], 60)
    loaded = {name for name in MODULES if world.exists(f"/sys/module/{name}")}
    result = world.run(["modprobe", "-r", *[name for name in MODULES if name in loaded or name == "nvidia"]], 60)
    if world.exists("/proc/driver/nvidia/version"):
        if step.detail["persistenced"]:
            world.run(["systemctl", "start", PERSISTENCE_UNIT])
        raise ApplyError(
            f"the module is still loaded ({result.tail() or 'modprobe -r said nothing'}); something uses it that shows "
            "no open file: reboot the host, or set nvidia_driver_reboot: true"
        )
    return back


def load(step: Step, world: World) -> Undo | None:
    """`load`: the loaded module is of `detail['version']`, by the kernel's own word."""
    result = world.run(["modprobe", "nvidia"], 120)
    text = world.read("/proc/driver/nvidia/version") or ""
    if step.detail["version"] not in text:
        log = world.run(["dmesg"]).out.splitlines()
        said = [line for line in log if "NVRM" in line or "nvidia" in line][-4:]
        raise ApplyError(f"modprobe ended with {result.rc} and the driver is not there: {result.tail()} {said}")
    return None


def pin_kernel(step: Step, world: World) -> Undo | None:
    """`pin-kernel`: Proxmox boots `target` from now on; a marker says that the pin is ours to take back."""
    world.must(["proxmox-boot-tool", "kernel", "pin", step.target], 300)
    world.write(PIN_MARKER, f"{step.target}\n")

    def undo() -> None:
        world.remove(PIN_MARKER)
        world.must(step.detail["undo"], 300)

    return undo


HANDLERS = {
    **apt.HANDLERS,
    "runfile": run_installer,
    "uninstall": runfile.uninstall,
    "dkms-install": dkms_install,
    "dkms-remove": dkms_remove,
    "unload": unload,
    "load": load,
    "pin-kernel": pin_kernel,
}
