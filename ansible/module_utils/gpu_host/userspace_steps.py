"""How the steps of the userspace's plan are taken, each proven by what stands there afterwards."""

from __future__ import annotations

from . import apt, runfile
from .apply import Undo
from .steps import ApplyError, Step
from .userspace_state import SONAMES, library_version, loader_cache
from .world import ContainerWorld, World


def run_installer(step: Step, world: World) -> Undo | None:
    """`runfile`: the installer `detail['source']` of the host ran here, and the loader finds its libraries.

    In a container it is pushed to the target path and removed again. There is no way back: what it replaced is gone.
    """
    pushed = isinstance(world, ContainerWorld)
    if isinstance(world, ContainerWorld):
        world.push(step.detail["source"], step.target, 0o755)
    try:
        world.remove(runfile.LOG)
        result = world.run(step.detail["argv"], runfile.TIMEOUT_S)
    finally:
        if pushed:
            world.remove(step.target)
    wrong = _not_of(world, step.detail["version"])
    if wrong:
        said = runfile.reason(world) if world.exists(runfile.LOG) else result.tail()
        raise ApplyError(f"the installer ended with {result.rc} and {wrong}: {said}")
    return None


def _not_of(world: World, version: str) -> str:
    """What the loader finds instead of this version, empty when it finds it."""
    cache = loader_cache(world.run(["ldconfig", "-p"]).out)
    for soname in SONAMES:
        paths = cache.get(soname, [])
        if not paths:
            return f"the loader knows no {soname}"
        end = world.end(paths[0])
        if library_version(end) != version:
            return f"{paths[0]} leads to {end or 'nothing'}"
    return ""


def remove_libraries(step: Step, world: World) -> Undo | None:
    """`remove-libraries`: the files `detail['paths']`, which no package owns, are gone from disk and loader."""
    paths: list[str] = step.detail["paths"]
    world.must(["rm", "-f", *paths])
    world.must(["ldconfig"])
    left = [path for path in paths if world.exists(path)]
    if left:
        raise ApplyError(f"still there: {', '.join(left)}")
    return None


HANDLERS = {
    **apt.HANDLERS,
    "runfile": run_installer,
    "remove-libraries": remove_libraries,
    "uninstall": runfile.uninstall,
}
