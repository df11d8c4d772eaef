"""How the steps of the passthrough's plan are taken: through `pct`, proven by the container, with a way back."""

from __future__ import annotations

from collections.abc import Mapping

from .apply import Undo
from .container_nodes import inside_differs, look_inside
from .lxc_config import edit_lines
from .steps import ApplyError, Step
from .world import ContainerWorld, World

#: `pct set` waits for the lock of the configuration, seconds.
SET_TIMEOUT_S = 60
START_TIMEOUT_S = 120
#: A started container answers and has its nodes within this time, seconds.
SETTLE_S = 20


def is_running(world: World, vmid: int) -> bool:
    return world.must(["pct", "status", str(vmid)], 30).out.strip().endswith("running")


def _set(world: World, vmid: str, values: Mapping[str, str], delete: list[str]) -> None:
    words = [word for key, value in values.items() for word in (f"-{key}", value)]
    words += ["-delete", ",".join(delete)] if delete else []
    if words:
        world.must(["pct", "set", vmid, *words], SET_TIMEOUT_S)


def pct_set(step: Step, world: World) -> Undo:
    """`pct-set`: the `devN` keys are set and deleted by one command; the way back is one as well."""
    vmid, detail = step.target, step.detail
    _set(world, vmid, detail["set"], detail["delete"])
    return lambda: _set(world, vmid, detail["undo_set"], detail["undo_delete"])


def raw_lines(step: Step, world: World) -> Undo:
    """`raw-lines`: lines of the main section are replaced in the container's file, which is then read back."""
    path = step.target
    before = world.read(path)
    if before is None:
        raise ApplyError(f"{path} cannot be read")
    after = edit_lines(before, step.detail["drop"], step.detail["add"])
    _write_in_place(world, path, after)

    def back() -> None:
        _write_in_place(world, path, before)

    return back


def _write_in_place(world: World, path: str, text: str) -> None:
    world.poke(path, text)
    if world.read(path) != text:
        raise ApplyError(f"{path} does not hold what was written to it")


def remove_inside(step: Step, world: World) -> None:
    """`remove-inside`: a file that pretends to be a device is gone from the running container."""
    vmid = int(step.target.partition(":")[0])
    ContainerWorld(world, vmid).remove(step.detail["path"])


def stop_container(step: Step, world: World) -> Undo:
    """`container-stop`: shut down by its own init within the time given, never by force; the way back starts it."""
    vmid, timeout_s = step.target, step.detail["timeout_s"]
    result = world.run(["pct", "shutdown", vmid, "--timeout", str(timeout_s)], timeout_s + 30)
    # Under high availability `pct` returns as soon as its manager has taken the order.
    if not world.wait(lambda: not is_running(world, int(vmid)), timeout_s if result.ok else 0, 1):
        raise ApplyError(
            f"it still runs {timeout_s} s after the shutdown, and is not stopped by force: {result.tail()}"
        )
    return lambda: _start(world, vmid)


def _start(world: World, vmid: str) -> None:
    world.must(["pct", "start", vmid], START_TIMEOUT_S)
    if not world.wait(lambda: is_running(world, int(vmid)), START_TIMEOUT_S, 1):
        raise ApplyError(f"container {vmid} does not run after its start")


def start_container(step: Step, world: World) -> Undo:
    """`container-start`: it runs, and inside stand exactly the nodes of `detail['nodes']` with their numbers."""
    vmid, timeout_s = step.target, step.detail["timeout_s"]
    _start(world, vmid)

    def stop() -> None:
        world.must(["pct", "shutdown", vmid, "--timeout", str(timeout_s), "--forceStop", "1"], timeout_s + 30)

    nodes = {path: (major, minor) for path, (major, minor) in step.detail["nodes"].items()}

    def difference() -> str:
        inside = look_inside(ContainerWorld(world, int(vmid)))
        return "it cannot be asked by `pct exec`" if inside is None else inside_differs(nodes, inside)

    if not world.wait(lambda: not difference(), SETTLE_S, 0.5):
        why = difference()
        stop()
        raise ApplyError(f"container {vmid} started, but {why}")
    return stop


HANDLERS = {
    "pct-set": pct_set,
    "raw-lines": raw_lines,
    "remove-inside": remove_inside,
    "container-stop": stop_container,
    "container-start": start_container,
}
