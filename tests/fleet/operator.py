"""An operator of the test fleet: job files in its inventory, `fab` as a user calls it, and a run that jobs work on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.command_line import drafthouse
from tests.doubles.nodes import Fleet, Node
from tests.fixtures_s3 import ACCESS_KEY, SECRET_KEY
from tests.patience import until

ROOT = Path(__file__).parents[2]
SECRETS = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]
SAMPLES, SAMPLES_PER_SHARD = 24, 2
SHARDS = SAMPLES // SAMPLES_PER_SHARD
STEPS = 500  # half a minute: long enough to lose a node in, on a fast machine too
TTL_S = 4
PORT = 8100
COPY = "Repeat this, one word a line:\nvunezos vozita makir vegum rugin"
COPY_ANSWER = "vunezos\nvozita\nmakir\nvegum\nrugin"
RUN_FILE = f"""\
name: small
corpus:
  samples: {SAMPLES}
  samples_per_shard: {SAMPLES_PER_SHARD}
  heldout: 2
  max_tokens: 160
  sources:
    - {{type: grammar, kind: lookup}}
    - {{type: grammar, kind: tool_call}}
answers: {{rows: 24, max_new_tokens: 8}}
extract: {{rows: 2, ttl_s: {TTL_S}}}
drafter:
  num_hidden_layers: 1
  num_attention_heads: 2
  num_key_value_heads: 1
  head_dim: 16
  block_size: 4
  target_layer_ids: [0, 2]
train:
  baseline: {{steps: 1}}
  ours:
    steps: {STEPS}
    rows: 6
    anchors: 12
    log_every: 1
    checkpoint_every: 20
    evaluate_every: 0
    loss: {{soft_weight: 0.5, weights: streak}}
    noise: {{kind: cosine, sigma: 0.05}}
probe: {{prompts: 0}}
"""


@dataclass
class Operator:
    """Whoever sits at the controller. `transcript` keeps what `fab` said, for a failing test to show."""

    fleet: Fleet
    store: str
    transcript: list[str] = field(default_factory=list)

    @property
    def inventory(self) -> Path:
        return self.fleet.inventory

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}

    def write_job(self, name: str, **values: Any) -> None:
        """A file under jobs/: a process in this environment, with the store's credentials as secrets."""
        job = {
            "name": name,
            "venv": sys.prefix,
            "secrets": SECRETS,
            "env": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
            "stop_grace_s": 20,
            "gate": {"timeout_s": 120, "poll_s": 0.3},
            **values,
        }
        (self.inventory / "jobs" / f"{name}.yml").write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")

    def bring(self, file: Path) -> str:
        """A file that jobs take along: it has to lie in the inventory folder. Its path there."""
        (self.inventory / file.name).write_bytes(file.read_bytes())
        return file.name

    def fab(self, *words: str, code: int = 0) -> Any:
        """What `fab … --json` printed; its exit status must be `code`."""
        fab = str(Path(sys.executable).with_name("fab"))
        found = subprocess.run(
            [fab, "--search-root", str(ROOT), *words, "--inventory", str(self.inventory), "--json"],
            capture_output=True,
            text=True,
            check=False,
            env=self.environment,
            timeout=200,
        )
        self.transcript.append(f"$ fab {' '.join(words)}\n{found.stdout}{found.stderr}")
        assert found.returncode == code, self.transcript[-1]
        return json.loads(found.stdout) if found.stdout.strip() else found.stderr.strip()


@dataclass(frozen=True)
class SealedRun:
    """A run whose answered corpus lies in the store; `file` is its run file, all that a worker needs."""

    file: Path
    folder: Path
    store: str


def sealed_run(folder: Path, store: str) -> SealedRun:
    """Build, answer and seal a small corpus in `store`, as an operator does before he deploys an extraction."""
    file = folder / "run.yml"
    file.write_text(f"{RUN_FILE}store: {json.dumps(store)}\n", encoding="utf-8")
    run = folder / "run"
    for verb in (
        ["corpus", "build", "--out", str(run), "--file", str(file)],
        ["corpus", "answer", "--out", str(run)],
        ["corpus", "seal", "--out", str(run)],
    ):
        outcome = drafthouse(*verb)
        assert outcome.code == 0, outcome
    return SealedRun(file, run, store)


def install_engine(node: Node, options: str = "") -> None:
    """A virtual environment on the node in which vLLM's server is the test double."""
    program = "/srv/engine/bin/python3"
    words = f"exec {sys.executable} -m tests.doubles.embedded_server {options}"
    node.execute(["mkdir", "-p", "/srv/engine/bin"])
    node.write(program, f'#!/bin/sh\n{words} "$@"\n'.encode())
    node.execute(["chmod", "755", program])


def serve_embedded(operator: Operator, admin: str, broken: str | None = None) -> None:
    """A job that serves the small target behind the proxy at `admin`; on the node `broken` it says nonsense."""
    profile = yaml.safe_load((ROOT / "inventory" / "profiles" / "embedded-dflash-cpu.yml").read_text())
    profile.update(name="plain", speculation={"method": "none"}, port=PORT)
    (operator.inventory / "profiles").mkdir(exist_ok=True)
    (operator.inventory / "profiles" / "plain.yml").write_text(yaml.safe_dump(profile))
    nodes = operator.fleet.nodes
    for node in nodes:
        install_engine(node, "--broken" if node.name == broken else "")
    operator.write_job(
        "serve",
        kind="serve",
        node="node1",
        venv="/srv/engine",
        profile="plain",
        host="0.0.0.0",
        secrets=[],
        stop_grace_s=10,
        proxy={
            "node": "node3",
            "admin": admin,
            "backend": "models",
            "servers": {node.name: node.name for node in nodes},
        },
    )


def overseers(node: Node, unit: str = "") -> list[int]:
    """The keeper and the supervisor of a unit, in this order: the one is the other's parent."""
    found = [pid for pid, line in node.pids().items() if "supervisor-" in line and " keep " in line and unit in line]
    return sorted(found, key=lambda pid: _parent(pid) in found)


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None  # it has ended


@contextmanager
def standing_still(node: Node, words: str, when: Callable[[], object], what: str) -> Iterator[None]:
    """As soon as `when` is true, the processes of a node whose command line holds `words` stand still until the block
    ends: `fab` needs seconds for a command, and a job must not be through before anything happens to it."""
    stopped: list[int] = []

    def stop() -> None:
        until(when, what, seconds=300, every=0.1)
        for pid, line in node.pids().items():
            if words in line and "supervisor-" not in line:
                os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield
        thread.join()
        assert stopped, f"nothing on {node.name} is called {words}"
    finally:
        thread.join()
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def heal(fleet: Fleet) -> None:
    """Every node joined and alive again, without the units that somebody left there."""
    for node in fleet.nodes:
        node.join()
        if not node.pids() or any("supervisor-" in line for line in node.pids().values()):
            node.restart()
        node.await_sshd()
        node.execute(["rm", "-rf", "/srv/drafthouse"])
