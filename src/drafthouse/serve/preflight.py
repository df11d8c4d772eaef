"""Everything that can be known before a launch, as a pure function of a profile and facts."""

from __future__ import annotations

from drafthouse.serve.facts import Facts
from drafthouse.serve.findings import Finding, error, not_checked, ordered
from drafthouse.serve.profile import Profile, Sglang
from drafthouse.serve.rules import checkpoints, engine, host, hybrid, memory, speculation

RULES = (engine.check, speculation.check, hybrid.check, checkpoints.check, host.check, memory.check)


def preflight(profile: Profile, facts: Facts) -> list[Finding]:
    """Judge a launch.

    Args:
        profile: what is to be served.
        facts: what is known; what is not known becomes a note `not-checked`, never a silent pass.

    Returns:
        Findings, errors first. With an error among them the launch would fail, or serve nonsense.
    """
    found = [finding for rule in RULES for finding in rule(profile, facts)]
    return ordered([*found, *_last_word(profile, facts)])


def _last_word(profile: Profile, facts: Facts) -> list[Finding]:
    """What SGLang's own argument resolver said about the line."""
    if not isinstance(profile.engine, Sglang):
        return []
    said = facts.resolution
    source = "SGLang's own argument resolver"
    if said is None:
        return [not_checked(source, "set engine.python (or --python) to an interpreter that has SGLang")]
    if said.error is not None:
        return [
            error(
                "resolver-refuses",
                f"SGLang {said.version} refuses the line: {said.error}",
                "correct what it names",
                source,
            )
        ]
    if said.resolved is None:
        return [not_checked(f"{source}: {said.unjudged}", "run the check on a node with a GPU")]
    values = ", ".join(f"{name} {value}" for name, value in said.resolved.items() if value is not None)
    return [
        Finding(
            "resolver-accepts",
            "note",
            f"SGLang {said.version} resolves the line to {values}",
            "compare with what you meant",
            source,
        )
    ]
