"""Every fault for every kind of job on a test fleet: what happens, what is done twice, and that nothing is lost.

A fault hits a job that works on one node, at a moment when it has shown progress and has not finished. What an operator
does about it (nothing, `fab migrate`, `fab recover`) belongs to the fault.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drafthouse.corpus import CorpusReader
from drafthouse.fleet.gates import train_progress
from drafthouse.states.heartbeat import Heartbeat
from drafthouse.store import Board, Lease, Store
from tests.command_line import drafthouse
from tests.doubles.nodes import Node
from tests.fixtures_s3 import s3_url
from tests.fleet.haproxy import haproxy
from tests.fleet.operator import (
    COPY,
    COPY_ANSWER,
    PORT,
    SHARDS,
    TTL_S,
    Operator,
    SealedRun,
    overseers,
    serve_embedded,
    standing_still,
)
from tests.patience import until

FAULTS = ("worker killed", "supervisor killed", "all processes killed", "node moved from", "node dead", "node cut off")
KINDS = ("extract", "train", "serve")
AT, TO = "node1", "node2"


@dataclass(frozen=True)
class Outcome:
    """What a fault led to.

    Attributes:
        kind, fault: which.
        answer: what the operator did.
        seconds: from the fault until the job worked again (or the operator's command was through).
        lost, duplicated: shards, steps or requests.
        redone: work that was done a second time, in the kind's own unit.
        total: of the whole job.
        unit: of these numbers.
        note: one line for people.
    """

    kind: str
    fault: str
    answer: str
    seconds: float
    lost: int
    duplicated: int
    redone: int
    total: int
    unit: str
    note: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def strike(operator: Operator, fault: str, job: str, words: str) -> str:
    """Let the fault happen to `job`, whose worker's command line holds `words`; what the operator does about it."""
    node = operator.fleet[AT]
    if fault == "worker killed":
        _kill(_pids(node, lambda line: words in line and "supervisor" not in line))
        return "nothing: restarted on its node"
    if fault == "supervisor killed":  # the lower of the two that stand over a unit
        _kill(overseers(node)[1:])
        return "nothing: restarted on its node"
    if fault == "all processes killed":
        _kill(_pids(node, lambda line: words in line or "supervisor" in line))
        operator.fab("deploy", "--job", job)
        return "fab deploy"
    if fault == "node moved from":
        operator.fab("migrate", "--from", AT, "--to", TO)
        return "fab migrate"
    node.cut()
    if fault == "node dead":
        node.kill()
    operator.fab("recover", "--from", AT, "--to", TO)
    if fault == "node cut off":
        node.join()  # the zombie is back, and finds itself replaced
    return "fab recover"


def extraction(operator: Operator, run: SealedRun, fault: str) -> Outcome:
    """Shards: every one committed once, whatever the fault."""
    store = Store.open(run.store)
    board = Board(store, "states", ttl_s=TTL_S)
    names = CorpusReader(store, "answers").shard_names
    operator.write_job(
        "extract",
        kind="extract",
        node=AT,
        command=["drafthouse", "states", "extract", "--out", "run"],
        files={"run/run.yml": operator.bring(run.file)},
        store=run.store,
    )
    with Heartbeat(board, "test") as heartbeat:
        held = [lease for name in names[4:] if (lease := board.claim([name], "somebody")) is not None]
        for lease in held:
            heartbeat.hold(lease)
        operator.fab("deploy", "--job", "extract")
        until(lambda: len(board.all_done()) >= 4, "the first shards")
        before = len(board.all_done())
        began = time.monotonic()
        give_back(heartbeat, board, held[:4])
        answer = strike(operator, fault, "extract", "drafthouse states extract")
        until(lambda: len(board.all_done()) > before, "a shard of the next life", seconds=300)
        seconds = time.monotonic() - began
        give_back(heartbeat, board, held[4:])
        until(lambda: len(board.all_done()) == SHARDS, "the commit of all shards", seconds=300)
    markers = board.all_done()
    for marker in markers:
        assert hashlib.sha256(board.objects.get(marker.key)).hexdigest() == marker.sha256
    ours = {lease.shard for lease in held}
    again = [one for one in markers if one.epoch > (2 if one.shard in ours else 1)]
    objects = [info.key for info in board.objects.list("data")]
    workers = sorted({marker.worker.partition("-e")[0] for marker in markers})
    return Outcome(
        "extract",
        fault,
        answer,
        round(seconds, 1),
        lost=len(set(names) - {marker.shard for marker in markers}),
        duplicated=len(markers) - len({marker.shard for marker in markers}),
        redone=len(again),
        total=len(names),
        unit="shards",
        note=f"{len(markers)} shards by {', '.join(workers)}; {len(objects) - len(markers)} orphans for the janitor",
    )


def training(operator: Operator, run: SealedRun, fault: str, undisturbed: dict[int, float]) -> Outcome:
    """Steps: the losses of an undisturbed run, to the last digit."""
    store = Store.open(run.store)
    operator.write_job(
        "train",
        kind="train",
        node=AT,
        recipe="ours",
        command=["drafthouse", "drafter", "train", "ours", "--out", "run"],
        files={"run/run.yml": operator.bring(run.file)},
        store=run.store,
    )
    words = "drafter train"
    with standing_still(operator.fleet[AT], words, lambda: _stored(store, 1), "a checkpoint in the store"):
        operator.fab("deploy", "--job", "train")
    reached = int((train_progress(store, "ours", 1) or {}).get("step", 0))
    began = time.monotonic()
    answer = strike(operator, fault, "train", words)
    epoch = 1 if answer.startswith("nothing") else 2
    if epoch == 1:
        until(lambda: _resumed(store, epoch), "a step of the next life", seconds=300)
    seconds = time.monotonic() - began
    until(lambda: (train_progress(store, "ours", epoch) or {}).get("finished"), "the end of the training", seconds=300)
    found = train_progress(store, "ours", epoch) or {}
    moved = losses(store.get(f"drafters/ours/metrics/{epoch}.jsonl").decode())
    wrong = {step for step, loss in undisturbed.items() if moved.get(step) != loss}
    from_step = int(found.get("resumed_from") or 0)
    return Outcome(
        "train",
        fault,
        answer,
        round(seconds, 1),
        lost=len(wrong),
        duplicated=0,
        redone=max(0, reached - from_step),
        total=len(undisturbed),
        unit="steps",
        note=f"resumed from step {from_step}; {len(moved)} losses, {len(wrong)} of them other than undisturbed",
    )


def serving(operator: Operator, fault: str, folder: Path) -> Outcome:
    """Requests: clients that ask through the proxy all the while."""
    nodes = operator.fleet.nodes
    with ExitStack() as stack:
        servers = {node.name: (node.address, PORT) for node in nodes}
        front = stack.enter_context(haproxy(operator.fleet.controller_address, servers, folder))
        serve_embedded(operator, front.admin)
        operator.fab("deploy", "--job", "serve")
        traffic = stack.enter_context(Traffic(front.url))
        until(lambda: len(traffic.answers) > 1, "answers to clients")
        began = time.monotonic()
        answer = strike(operator, fault, "serve", "embedded_server")
        done = len(traffic.answers)
        until(lambda: len(traffic.answers) > done + 1, "further answers to clients", seconds=300)
        seconds = time.monotonic() - began
    assert set(traffic.answers) == {COPY_ANSWER}
    return Outcome(
        "serve",
        fault,
        answer,
        round(seconds, 1),
        lost=len(traffic.failures),
        duplicated=0,
        redone=0,
        total=len(traffic.answers) + len(traffic.failures),
        unit="requests",
        note=f"{len(traffic.answers)} answered, {len(traffic.failures)} failed while it was down",
    )


@dataclass
class Traffic:
    """A client that asks all the time, over new connections; what it was answered."""

    url: str
    answers: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> None:
        body = {"messages": [{"role": "user", "content": COPY}], "max_tokens": 48}
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                self.answers.append(json.load(answer)["choices"][0]["message"]["content"])
        except OSError as error:
            self.failures.append(f"{time.monotonic():.2f} {error}")
            time.sleep(0.2)

    def __enter__(self) -> Traffic:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.1):  # the nodes share this machine's cores: leave them some
            self.ask()


def fresh(run: SealedRun, endpoint: str, folder: Path) -> SealedRun:
    """A copy of a run with a store of its own, so that each fault meets the same beginning."""
    url = s3_url(endpoint)
    source, copy = Store.open(run.store), Store.open(url)
    for info in source.list():
        copy.put(info.key, source.get(info.key))
    folder.mkdir(parents=True)
    file = folder / "run.yml"
    file.write_text(run.file.read_text().replace(json.dumps(run.store), json.dumps(url)), encoding="utf-8")
    return SealedRun(file, folder / "run", url)


def undisturbed(run: SealedRun, folder: Path) -> dict[int, float]:
    """The losses of a training that nothing happens to, with the states of `run`."""
    folder.mkdir(parents=True)
    shutil.copy(run.file, folder / "run.yml")
    outcome = drafthouse("drafter", "train", "ours", "--out", str(folder))
    assert outcome.code == 0, outcome
    return losses((folder / "drafters" / "ours" / "metrics.jsonl").read_text())


def losses(text: str) -> dict[int, float]:
    """Loss by step of a metrics.jsonl."""
    rows = [json.loads(line) for line in text.splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def give_back(heartbeat: Heartbeat, board: Board, leases: Sequence[Lease]) -> None:
    """Let others have shards that the test has held."""
    for lease in leases:
        heartbeat.drop(lease, board.release)


def _pids(node: Node, chosen: Callable[[str], bool]) -> list[int]:
    found = [pid for pid, line in node.pids().items() if chosen(line)]
    assert found, node.pids()
    return found


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # the end of another of them was its own
            os.kill(pid, signal.SIGKILL)


def _stored(store: Store, epoch: int) -> bool:
    found = train_progress(store, "ours", epoch) or {}
    return bool(found.get("stored")) and not found.get("finished")


def _resumed(store: Store, epoch: int) -> bool:
    found = train_progress(store, "ours", epoch) or {}
    return bool(found.get("finished")) or (
        found.get("resumed_from") is not None and found["step"] > found["resumed_from"]
    )
