"""How every module of ours runs: facts, plan, refusal or steps, and the world read back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .apply import Handler, apply
from .steps import ApplyError, Plan
from .world import World


def conclude(
    module: Any,
    world: World,
    plan_of: Callable[[], Plan],
    handlers: dict[str, Handler] | None = None,
    **extra: Any,
) -> None:
    """Plan, then refuse, show (check mode) or act; after acting, plan again: steps that remain are an error.

    Notes of the plan are shown as warnings, because nobody reads the result of a task that went well.

    Args:
        module: the AnsibleModule; `supports_check_mode` must be set.
        plan_of: gathers facts and plans; called a second time after the steps.
        extra: keys for the result.
    """
    plan = plan_of()
    for note in plan.notes:
        module.warn(note)
    if plan.refused:
        module.fail_json(msg=plan.refusal_text(), plan=plan.as_dict(), **extra)
    result: dict[str, Any] = {"changed": plan.changed, "plan": plan.as_dict(), "diff": _diff(plan, world), **extra}
    if not plan.changed or module.check_mode:
        module.exit_json(**result)
    try:
        result["done"] = apply(plan, world, handlers)
    except ApplyError as failure:
        module.fail_json(msg=str(failure), plan=plan.as_dict(), **extra)
    left = plan_of()
    if left.refused or left.steps:
        remaining = [r.sentence() for r in left.refusals] + [s.sentence() for s in left.steps]
        module.fail_json(
            msg=f"the steps ran, but the host is not as desired: {'; '.join(remaining)}",
            plan=left.as_dict(),
            done=result["done"],
            **extra,
        )
    module.exit_json(**result)


def _diff(plan: Plan, world: World) -> list[dict[str, str]]:
    """Files as before and after, other steps as sentences: what `--diff` prints."""
    shown: list[dict[str, str]] = []
    for step in plan.steps:
        if step.action == "remove" or "text" in step.detail:
            before = world.read(step.target) or ""
            after = "" if step.action == "remove" else step.detail["text"]
            shown.append({"before_header": step.target, "after_header": step.target, "before": before, "after": after})
        else:
            shown.append({"prepared": f"{step.sentence()}\n"})
    return shown
