"""Every role is whole, and ansible-lint has nothing to say in its strictest profile."""

from __future__ import annotations

import pytest
import yaml

from tests.roles.runs import ANSIBLE, run

ROLES = sorted(path.name for path in (ANSIBLE / "roles").iterdir() if path.is_dir())


@pytest.mark.parametrize("role", ROLES)
def test_role_is_whole(role: str) -> None:
    folder = ANSIBLE / "roles" / role
    missing = [
        name
        for name in (
            "defaults/main.yml",
            "meta/argument_specs.yml",
            "meta/main.yml",
            "tasks/main.yml",
            "tasks/verify.yml",
        )
        if not (folder / name).is_file()
    ]
    # Looking needs no way back.
    if role != "preflight" and not (folder / "tasks/reset.yml").is_file():
        missing.append("tasks/reset.yml")
    # A scenario of its own on the machine double, or a place in the one that has a real engine.
    shared = (ANSIBLE / "molecule/docker/converge.yml").read_text(encoding="utf-8")
    if not (ANSIBLE / "molecule" / role / "molecule.yml").is_file() and f"name: {role}\n" not in shared:
        missing.append(f"molecule/{role}")
    assert missing == []


@pytest.mark.parametrize("role", ROLES)
def test_defaults_are_documented(role: str) -> None:
    folder = ANSIBLE / "roles" / role
    specs = yaml.safe_load((folder / "meta/argument_specs.yml").read_text(encoding="utf-8"))["argument_specs"]
    options = specs["main"]["options"]
    defaults = yaml.safe_load((folder / "defaults/main.yml").read_text(encoding="utf-8")) or {}
    assert set(defaults) <= set(options)
    assert all(option.get("description") for option in options.values())
    stated = {name: option["default"] for name, option in options.items() if "default" in option}
    assert {name: defaults[name] for name in stated if name in defaults} == stated


def test_ansible_lint_is_silent() -> None:
    # It checks the syntax of every playbook, the scenarios' included.
    done = run("ansible-lint", "--strict", "-q", "--nocolor", timeout_s=600)
    assert done.rc == 0, done.text
