"""What a planner answers: steps to take, or refusals with a way out; never both acted upon."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Step:
    """One change of the host, small enough to read back.

    Attributes:
        action: the verb that the applier knows, such as `write`, `remove`, `rebind`, `run`.
        target: what it touches: a PCI address, a path, `129:dev0`.
        why: one clause that an operator can judge.
        detail: parameters of the action, JSON types only.
    """

    action: str
    target: str
    why: str
    detail: dict[str, Any] = field(default_factory=dict)

    def sentence(self) -> str:
        return f"{self.action} {self.target}: {self.why}"


@dataclass(frozen=True)
class Refusal:
    """A reason not to touch the host, found before the first write.

    Attributes:
        rule: stable name of the rule, such as `held-by-vm`; documentation and tests refer to it.
        what: what is wrong, without a final full stop.
        where: file and key, PCI address or host that it was found in.
        fix: what the operator can do; where there are two ways out, both.
    """

    rule: str
    what: str
    where: str
    fix: str

    def sentence(self) -> str:
        return f"{self.where}: {self.what}; {self.fix}"


@dataclass
class Plan:
    """Steps in the order in which they must run; empty means that the host is as desired."""

    steps: list[Step] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def refused(self) -> bool:
        return bool(self.refusals)

    @property
    def changed(self) -> bool:
        return bool(self.steps) and not self.refusals

    def as_dict(self) -> dict[str, Any]:
        """JSON types, for the result of a module."""
        return {
            "steps": [{"action": s.action, "target": s.target, "why": s.why, "detail": s.detail} for s in self.steps],
            "refusals": [{"rule": r.rule, "what": r.what, "where": r.where, "fix": r.fix} for r in self.refusals],
            "notes": list(self.notes),
        }

    def refusal_text(self) -> str:
        """All refusals, one sentence a line: an operator should not have to find them one run at a time."""
        return "\n".join(f"[{r.rule}] {r.sentence()}" for r in self.refusals)


class ApplyError(Exception):
    """A step that did not have its effect; what was done before it has been undone where that is safe."""
