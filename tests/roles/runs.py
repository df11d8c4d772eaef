"""Running Ansible and Molecule from tests: what they said, and what they counted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.doubles.machine.boot import REPOSITORY, why_not

ANSIBLE = REPOSITORY / "ansible"
CONNECTIONS = ANSIBLE / "molecule/machine/connections.yml"
needs_machine = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
_RECAP = re.compile(r"^(?P<host>\S+)\s+:\s+(?P<counts>ok=.*)$", re.MULTILINE)
_TASK = re.compile(r"^(?:TASK|RUNNING HANDLER) \[(.*?)\] \**$")
_OUTCOME = re.compile(r"^(changed|fatal|failed): \[([^\] ]+)")


@dataclass(frozen=True)
class Run:
    """One run of a program.

    Attributes:
        rc: exit status.
        text: what it said, both streams.
    """

    rc: int
    text: str

    def counts(self, host: str) -> dict[str, int]:
        """`ok`, `changed`, `failed`, … of a host in the recap of a playbook."""
        for match in _RECAP.finditer(self.text):
            if match["host"] == host:
                return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", match["counts"])}
        raise AssertionError(f"no recap of {host} in:\n{self.text}")

    def tasks(self, outcome: str) -> list[str]:
        """Names of the tasks that ended as `changed` or `fatal`."""
        found, task = [], ""
        for line in self.text.splitlines():
            if match := _TASK.match(line):
                task = match[1]
            elif (match := _OUTCOME.match(line)) and match[1] == outcome:
                found.append(task)
        return found


def environment(**more: str) -> dict[str, str]:
    """Variables for Ansible: this environment's programs first, no colours, no width that breaks lines."""
    programs = str(Path(sys.executable).parent)
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith(("ANSIBLE_", "MOLECULE_", "PYTEST_"))},
        "PATH": f"{programs}:{os.environ['PATH']}",
        "ANSIBLE_NOCOLOR": "1",
        "NO_COLOR": "1",
        "COLUMNS": "200",
        "MACHINE_OWNER": str(os.getpid()),
        "MACHINE_REPOSITORY": str(REPOSITORY),
        **more,
    }


def run(*argv: str, folder: Path = ANSIBLE, timeout_s: float = 300, **variables: str) -> Run:
    """Run a program of this environment to its end."""
    done = subprocess.run(
        list(argv),
        cwd=folder,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Run(done.returncode, done.stdout)


def playbook(machine: Path, *arguments: str, **variables: str) -> Run:
    """`ansible-playbook` with the fleet's inventory, its hosts reached through the machine double in `machine`."""
    return run(
        "ansible-playbook",
        "--inventory=../inventory/hosts.yml",
        f"--inventory={CONNECTIONS}",
        *arguments,
        MACHINE_FOLDER=str(machine),
        **variables,
    )


def passes(scenario: str, folder: Path) -> None:
    """Run all steps of a Molecule scenario, its files below `folder`, and expect that none fails."""
    done = run(
        *("molecule", "-c", ".config/molecule/config.yml", "test", "--scenario-name", scenario),
        MOLECULE_EPHEMERAL_DIRECTORY=str(folder),
    )
    assert done.rc == 0, done.text
