"""Acting on a plan: one step after the other, each with its way back until all of them have held."""

from __future__ import annotations

from collections.abc import Callable

from .steps import ApplyError, Plan, Step
from .world import World

Undo = Callable[[], None]
#: Takes a step, acts, checks that it had its effect, and returns how to undo it (None: nothing to undo).
Handler = Callable[[Step, World], "Undo | None"]


def write_file(step: Step, world: World) -> Undo | None:
    """`write`: the file at the target has `detail['text']`, and the permissions `detail['mode']` where they are given.

    A file that was there keeps its owner, and its permissions where none are given.
    """
    path, back = step.target, _given_back(step.target, world)
    world.write(path, step.detail["text"], step.detail.get("mode"))
    return back or (lambda: world.remove(path))


def remove_file(step: Step, world: World) -> Undo | None:
    """`remove`: the file at the target is gone."""
    back = _given_back(step.target, world)
    world.remove(step.target)
    return back


def _given_back(path: str, world: World) -> Undo | None:
    """How a file becomes what it is now: text, permissions and owner; None where there is none."""
    text, whose = world.read(path), world.ownership(path)
    if text is None or whose is None:
        return None
    return lambda: world.write(path, text, whose.mode, whose.owner)


def run_command(step: Step, world: World) -> Undo | None:
    """`run`: the command `detail['argv']` within `detail['timeout_s']` seconds; `detail['undo']` is its way back."""
    world.must(step.detail["argv"], step.detail.get("timeout_s", 600))
    undo = step.detail.get("undo")
    return (lambda: world.run(undo, step.detail.get("timeout_s", 600))) if undo else None  # type: ignore[return-value]


FILES_AND_COMMANDS: dict[str, Handler] = {"write": write_file, "remove": remove_file, "run": run_command}


def apply(plan: Plan, world: World, handlers: dict[str, Handler] | None = None) -> list[str]:
    """Take the steps in order; after a failure, undo what was done, newest first.

    Args:
        handlers: by action, on top of `write`, `remove` and `run`.

    Returns:
        A sentence for each step taken.

    Raises:
        ApplyError: a step failed; the message says which, why, and what could not be undone.
    """
    known = {**FILES_AND_COMMANDS, **(handlers or {})}
    undos: list[tuple[Step, Undo]] = []
    done: list[str] = []
    for step in plan.steps:
        try:
            undo = known[step.action](step, world)
        except (ApplyError, OSError) as failure:
            left = _undo(undos)
            state = f"; could not be undone: {'; '.join(left)}" if left else "; earlier steps were undone"
            raise ApplyError(f"{step.sentence()}: {failure}{state if undos else ''}") from failure
        if undo:
            undos.append((step, undo))
        done.append(step.sentence())
    return done


def _undo(undos: list[tuple[Step, Undo]]) -> list[str]:
    left = []
    for step, undo in reversed(undos):
        try:
            undo()
        except (ApplyError, OSError) as failure:
            left.append(f"{step.sentence()} ({failure})")
    return left
