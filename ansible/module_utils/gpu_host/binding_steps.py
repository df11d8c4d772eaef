"""How the steps of the binding's plan are taken: bounded, proven by what sysfs says afterwards, with a way back."""

from __future__ import annotations

import contextlib

from .apply import Undo, write_file
from .binding import expected_nodes, has_no_card, is_vfio
from .nvidia import character_majors, read_gpus
from .pci import DEVICES, linked_name, override_of, read_functions
from .proxmox import read_reservations
from .steps import ApplyError, Step
from .users import read_users
from .world import World

#: The kernel publishes a new driver link or node within this time, seconds.
SETTLE_S = 5.0


def bound_driver(world: World, address: str) -> str | None:
    return linked_name(world, f"{DEVICES}/{address}/driver")


def rebind(step: Step, world: World) -> Undo:
    """`rebind`: the function is on `detail['driver']` and its `driver_override` says `detail['override']`.

    With `detail['optional']` it may end without a driver, when no module claims it. After a failure it is on its
    previous driver again.
    """
    address, timeout_s = step.target, step.detail["timeout_s"]
    driver, override = bound_driver(world, address), override_of(world, address)
    _refuse_late_users(world, address)

    def back() -> None:
        _claim(world, address, driver or "", override, timeout_s)

    try:
        _claim(
            world, address, step.detail["driver"], step.detail["override"], timeout_s, optional=step.detail["optional"]
        )
    except (ApplyError, OSError) as failure:
        try:
            back()
        except (ApplyError, OSError) as stuck:
            raise ApplyError(f"{failure}; it could not be given back to {driver or 'no driver'}: {stuck}") from failure
        raise ApplyError(f"{failure}; it is on {driver or 'no driver'} as before") from failure
    return back


def _refuse_late_users(world: World, address: str) -> None:
    """The plan looked a moment ago; a VM or a process that has taken the card since wins."""
    functions = read_functions(world)
    for other, vmid in read_reservations(world, functions).items():
        if other.rsplit(".", 1)[0] == address.rsplit(".", 1)[0]:
            raise ApplyError(f"VM {vmid} has just taken {other}")
    users = read_users(world, functions, read_gpus(world), _majors(world)).get(address, ())
    if users:
        raise ApplyError(f"process {', '.join(users)} has just opened its device")


def _claim(
    world: World, address: str, driver: str, override: str | None, timeout_s: float, optional: bool = False
) -> None:
    """Bind one function to `driver` (empty: to none) and leave `driver_override` as `override`.

    Raises:
        ApplyError: a write did not return in time, or the function is on another driver than wanted.
        OSError: the kernel refused a write.
    """
    device = f"{DEVICES}/{address}"
    bound = bound_driver(world, address)
    if bound and bound != driver:
        world.poke_within(f"{device}/driver/unbind", address, timeout_s)
        if not world.wait(lambda: bound_driver(world, address) is None, timeout_s):
            raise ApplyError(f"{address} is still on {bound} {timeout_s:g} s after it was unbound")
    if driver:
        _set_override(world, address, driver)
        if bound_driver(world, address) != driver:
            _probe(world, address, driver, timeout_s, optional)
        now = bound_driver(world, address)
        if now != driver and not (optional and not is_vfio(now)):
            raise ApplyError(f"{address} is on {now or 'no driver'} after the probe, not on {driver}")
    if not driver or override != driver:
        _set_override(world, address, override)
    if override_of(world, address) != override:
        raise ApplyError(f"driver_override of {address} does not take {override or 'an empty text'}")


def _set_override(world: World, address: str, driver: str | None) -> None:
    if override_of(world, address) != driver:
        # A line feed clears it; an empty write would not reach the kernel at all.
        world.poke(f"{DEVICES}/{address}/driver_override", driver or "\n")


def _probe(world: World, address: str, driver: str, timeout_s: float, optional: bool) -> None:
    if not world.exists(f"/sys/bus/pci/drivers/{driver}"):
        if optional:
            return  # A companion without its module stays free, and its override keeps vfio-pci away.
        world.must(["modprobe", driver], 60)
    # Loading the module may have bound it already; a probe of a bound function changes nothing.
    with contextlib.suppress(*([OSError] if optional else [])):
        world.poke_within("/sys/bus/pci/drivers_probe", address, timeout_s)
    world.wait(lambda: bound_driver(world, address) == driver, 0.5 if optional else SETTLE_S)


def change_command_line(step: Step, world: World) -> Undo:
    """`cmdline`: the file has `detail['text']`, and `detail['refresh']` told the boot loader."""
    undo_file = write_file(step, world)
    refresh = step.detail["refresh"]

    def back() -> None:
        if undo_file:
            undo_file()
        world.must(refresh, 120)

    try:
        world.must(refresh, 120)
    except ApplyError:
        if undo_file:
            undo_file()
        raise
    return back


def _majors(world: World) -> dict[str, int]:
    """Read anew each time, because every load of a module may change them."""
    return character_majors(world.read("/proc/devices") or "")


def _expected(world: World, driven: bool) -> dict[str, tuple[int, int]]:
    """What must stand below /dev now."""
    if not driven:
        return {}
    minors = [gpu.minor for gpu in read_gpus(world) if gpu.minor is not None]
    return expected_nodes(sorted(minors), _majors(world))


def make_nodes(step: Step, world: World) -> Undo:
    """`nodes`: a device stands at every path that a driven card needs, and no card's node without a card.

    What stands there with other numbers, or as the empty file that a bind mount left, goes first: nvidia-modprobe
    would take it for the node. The way back removes what was made.
    """
    before = set(world.glob("/dev/nvidia*"))

    def back() -> None:
        for path in set(world.glob("/dev/nvidia*")) - before:
            world.remove(path)

    try:
        _make_nodes(world, step.detail["driven"])
    except ApplyError:
        back()
        raise
    return back


def _make_nodes(world: World, driven: bool) -> None:
    if driven:
        world.must(["modprobe", "nvidia-uvm"])
    wanted = _expected(world, driven)
    for path in world.glob("/dev/nvidia*"):
        if has_no_card(path, wanted) or (path in wanted and world.device(path) != ("char", *wanted[path])):
            world.remove(path)
    if driven:
        minors = sorted({minor for path, (_, minor) in wanted.items() if "-uvm" not in path}, reverse=True)
        world.must(["nvidia-modprobe", *(word for minor in minors for word in ("-c", str(minor)))])
        world.must(["nvidia-modprobe", "-u", "-c", "0"])
    wrong = [path for path, numbers in wanted.items() if world.device(path) != ("char", *numbers)]
    if wrong:
        raise ApplyError(f"nvidia-modprobe ran, but {', '.join(wrong)} is not the device that it must be")


HANDLERS = {"rebind": rebind, "cmdline": change_command_line, "nodes": make_nodes}
