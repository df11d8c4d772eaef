"""docs/runbooks/deploy.md, followed line by line: the document is the script."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from drafthouse.store import Board, Store
from tests.fleet.operator import ROOT, RUN_FILE, SHARDS, STEPS, Operator

pytestmark = [pytest.mark.faults, pytest.mark.s3, pytest.mark.slow]

PAGE = ROOT / "docs" / "runbooks" / "deploy.md"
STORE = "s3://drafthouse/qwen?endpoint=http://10.20.0.9:8333&region=us-east-1"
MODEL = "/srv/models/Qwen3.6-27B"
FINGERPRINT = "SHA256:..."
# The names on the page -> the nodes of the test.
NODES = {"rented1": "node1", "rented2": "node2"}


@dataclass(frozen=True)
class Step:
    """A section of the page and a block of commands in it."""

    heading: str
    commands: str


def steps_of(page: str) -> list[Step]:
    """All blocks of commands in order."""
    found, heading = [], ""
    for match in re.finditer(r"^## (?:\d+\. )?([^\n]+)$|^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        heading = match[1] or heading
        if match[2]:
            found.append(Step(heading, match[2]))
    return found


@dataclass
class Shell:
    """The controller of the page: a folder with `inventory/`, credentials in the environment, our programs in PATH."""

    operator: Operator
    folder: Path
    fingerprint: str = ""

    def run(self, commands: str) -> str:
        """What the block printed; it must end well, and its last lines are shown when it does not."""
        text = commands.replace(STORE, self.operator.store).replace(MODEL, "embedded")
        if FINGERPRINT in text:
            assert self.fingerprint, "the page pins a fingerprint before it has shown one"
            text = text.replace(FINGERPRINT, self.fingerprint)
        found = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder,
            env=self.operator.environment | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
            timeout=400,
        )
        self.operator.transcript.append(f"{text}{found.stdout}{found.stderr}")
        assert found.returncode == 0, self.operator.transcript[-1][-4000:]
        shown = re.search(r"SHA256:[A-Za-z0-9+/]{43}", found.stdout)
        self.fingerprint = shown[0] if shown else self.fingerprint
        return found.stdout


@pytest.fixture
def shell(operator: Operator, tmp_path: Path) -> Shell:
    """The page's inventory: its node names over the nodes of the test, its job files with the test's environment."""
    hosts = yaml.safe_load((operator.inventory / "hosts.yml").read_text())
    nodes = hosts["all"]["children"]["rented"]["hosts"]
    hosts["all"]["children"]["rented"]["hosts"] = {name: nodes[node] for name, node in NODES.items()}
    (operator.inventory / "hosts.yml").write_text(yaml.safe_dump(hosts))
    known = (operator.inventory / "known_hosts").read_text().splitlines(keepends=True)
    new = nodes[NODES["rented2"]]["ansible_host"]
    (operator.inventory / "known_hosts").write_text("".join(line for line in known if new not in line.split()[0]))
    run = operator.inventory / "jobs" / "qwen" / "run.yml"
    run.parent.mkdir(exist_ok=True)
    run.write_text(f"{RUN_FILE}store: {json.dumps(operator.store)}\n")
    common = {"files": {"run.yml": "jobs/qwen/run.yml"}, "store": operator.store, "node": "rented1"}
    extract = ["drafthouse", "states", "extract", "--out", "."]
    operator.write_job("extract-qwen", kind="extract", command=extract, **common)
    train = ["drafthouse", "drafter", "train", "ours", "--out", "."]
    operator.write_job("train-qwen", kind="train", command=train, recipe="ours", **common)
    folder = tmp_path / "controller"
    folder.mkdir()
    (folder / "inventory").symlink_to(operator.inventory)
    (folder / "fabfile.py").symlink_to(ROOT / "fabfile.py")
    return Shell(operator, folder)


def test_the_page_leads_from_a_new_node_to_a_drafter_for_an_engine(operator: Operator, shell: Shell) -> None:
    store, said = Store.open(operator.store), dict[str, str]()
    for step in steps_of(PAGE.read_text(encoding="utf-8")):
        if step.heading == "The node has vanished":
            operator.fleet[NODES["rented1"]].cut()
        said[step.heading] = said.get(step.heading, "") + shell.run(step.commands)

    assert "create-only puts are honoured" in said["The store can be trusted"]
    assert "is trusted" in said["The node is the one you rented"]
    assert f"{SHARDS} shards: {SHARDS} done" in said["Hidden states"]
    assert len(Board(store, "states").all_done()) == SHARDS
    assert "train-qwen" in said["The drafter"]
    assert "step" in said["The provider wants the node back"]
    assert "step" in said["The node has vanished"]
    judged = said["The drafter is judged and exported"]
    assert "4 of 4 texts identical" in judged
    assert "14 tensors, bfloat16, read back" in judged
    assert sorted(file.name for file in (shell.folder / "runs" / "qwen-dflash").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    curve = store.get("drafters/ours/metrics/3.jsonl").decode().splitlines()
    assert json.loads(curve[-1])["step"] == STEPS
    assert [line for line in said["Tidy up"].splitlines() if "recover" in line and "train-qwen" in line]


def test_the_page_names_files_that_are_there() -> None:
    named = re.findall(r"`(inventory/[^`]+)`, `([^`]+)`|`(inventory/[^`]+)`", PAGE.read_text(encoding="utf-8"))
    files = {name for names in named for name in names if name}
    assert {"inventory/hosts.yml", "inventory/jobs/qwen/run.yml", "inventory/jobs/extract-qwen.yml"} <= files
    for name in files:
        path = name if name.startswith("inventory/") else f"inventory/jobs/{name}"
        assert (ROOT / path).is_file(), path
