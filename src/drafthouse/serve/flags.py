"""Flags and variables that engines renamed or removed: translated where the meaning is kept, else refused.

A profile written for an older release either goes on meaning the same thing or is stopped with the new name;
an engine's own answer to an old flag is an argument parser's error at start, or silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from drafthouse.serve.profile import Flag
from drafthouse.serve.versions import before

Action = Literal["renamed", "dropped", "refused"]


@dataclass(frozen=True)
class Retired:
    """One flag (or environment variable) that is no longer what it was.

    Attributes:
        old: its name, without dashes.
        since: first release known to take the new spelling; older ones are left alone.
        new: the flag that replaces it; None: it is dropped.
        new_value: value of `new`; None: the old value is kept.
        only: the entry is about this value of the flag only.
        refuse: there is no safe translation: what to write instead.
        source: where it is known from.
    """

    old: str
    since: str
    source: str
    new: str | None = None
    new_value: Flag | None = None
    only: Flag | None = None
    refuse: str | None = None


@dataclass(frozen=True)
class Change:
    """What became of one retired flag of a profile."""

    old: str
    action: Action
    text: str
    source: str


@dataclass(frozen=True)
class Translation:
    """Flags and environment as the engine's release wants them, and what was changed on the way."""

    flags: dict[str, Flag]
    environment: dict[str, str]
    changes: tuple[Change, ...]


_0523 = "SGLang 0.5.23, argument parser"
_GRAPHS = "write decode-graph and prefill-graph settings apart: cuda-graph-{}-decode or cuda-graph-{}-prefill"
FLAGS: dict[str, tuple[Retired, ...]] = {
    "sglang": (
        Retired("mamba-scheduler-strategy", "0.5.17", "sgl-project/sglang#27418", new="mamba-radix-cache-strategy"),
        Retired("speculative-dflash-draft-window-size", "0.5.23", _0523, new="speculative-draft-window-size"),
        Retired("cuda-graph-max-bs", "0.5.17", _0523, refuse=_GRAPHS.format("max-bs", "max-bs")),
        Retired("cuda-graph-bs", "0.5.17", _0523, refuse=_GRAPHS.format("bs", "bs")),
        Retired(
            "disable-piecewise-cuda-graph",
            "0.5.17",
            _0523,
            new="cuda-graph-backend-prefill",
            new_value="disabled",
        ),
        Retired("enable-piecewise-cuda-graph", "0.5.17", "sgl-project/sglang#30620"),
        Retired(
            "enforce-piecewise-cuda-graph",
            "0.5.17",
            "sgl-project/sglang#30620",
            refuse="the piecewise graph is gone: leave it out (the breakable prefill graph is on by default) or,"
            " to force it, write cuda-graph-backend-prefill: breakable",
        ),
        Retired(
            "cuda-graph-backend-prefill",
            "0.5.23",
            _0523,
            only="tc_piecewise",
            refuse="the value tc_piecewise is gone: write breakable, full or disabled",
        ),
    ),
    "vllm": (Retired("mamba-cache-mode", "0.33.0", "vLLM 0.33.0: without effect, prefix caching decides"),),
}
VARIABLES: dict[str, tuple[Retired, ...]] = {
    "sglang": (Retired("SGLANG_ENABLE_SPEC_V2", "0.5.23", "SGLang 0.5.23: the second worker is the only one"),),
    "vllm": (),
}


def translate(engine: str, version: str, flags: Mapping[str, Flag], environment: Mapping[str, str]) -> Translation:
    """Bring `flags` and `environment` to what `version` of `engine` understands.

    A refused flag is left out of the result and stands in `changes`; whoever wants to launch must look there.
    """
    new_flags: dict[str, Flag] = {}
    changes: list[Change] = []
    for name, value in flags.items():
        rule = _rule(FLAGS[engine], version, name, value)
        if rule is None:
            new_flags[name] = value
        else:
            changes.append(_change(rule, name))
            # A bare switch that was off asks for nothing, whatever it is called today.
            if rule.new is not None and not (rule.new_value is not None and value is False):
                new_flags[rule.new] = value if rule.new_value is None else rule.new_value
    new_environment: dict[str, str] = {}
    for name, text in environment.items():
        rule = _rule(VARIABLES[engine], version, name, text)
        if rule is None:
            new_environment[name] = text
        else:
            changes.append(_change(rule, name))
    return Translation(new_flags, new_environment, tuple(changes))


def _rule(rules: tuple[Retired, ...], version: str, name: str, value: Flag) -> Retired | None:
    for rule in rules:
        if rule.old == name and not before(version, rule.since) and rule.only in (None, value):
            return rule
    return None


def _change(rule: Retired, name: str) -> Change:
    if rule.refuse is not None:
        return Change(name, "refused", rule.refuse, rule.source)
    if rule.new is None:
        return Change(name, "dropped", "it has no effect any more: remove it", rule.source)
    new = rule.new if rule.new_value is None else f"{rule.new}: {rule.new_value}"
    return Change(name, "renamed", f"write {new}", rule.source)
