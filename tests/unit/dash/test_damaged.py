"""One damaged object in a store: it is named with the reason, and everything else is shown, in every view."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from drafthouse.dash import keys
from drafthouse.dash.cli import summary
from drafthouse.dash.collector import Collector
from drafthouse.dash.model import Snapshot
from drafthouse.dash.settings import DashSettings
from drafthouse.dash.web import create_app
from drafthouse.store import Board, Store
from drafthouse.store.body import LARGEST
from drafthouse.store.keys import numbered

GPU = {"index": 0, "name": "NVIDIA H200", "utilization_percent": 50, "memory_mib": 100, "used_mib": 10, "power_w": 10}
# Objects of which a look reads the body, and what a view shows when all of them are whole.
SPEC, MARKER, FAILED, LEASE, WORDS = "spec.json", "done/s0", "failed/s3/1", "lease/s3/2", "workers/w9"
PROGRESS, CURVE = "progress/1", "metrics/1.jsonl"
READ = {
    **dict.fromkeys((SPEC, MARKER, FAILED, LEASE, WORDS), "runs/demo"),
    **dict.fromkeys((PROGRESS, CURVE), "drafters/ours"),
}
RUBBISH = [b"", b"{cut", b"[1]", b'"x"', b"null", b"\xff\x00", b"[" * 100_000, b"0" * (LARGEST + 1)]
ODD: list[Any] = [float("nan"), float("inf"), 10**400, -5, 10**12, [1], {"a": 1}, "x", True, None]


def full_key(key: str) -> str:
    """As the store has it: epochs are padded."""
    kind, _, rest = key.rpartition("/")
    number, dot, suffix = rest.partition(".")
    return f"{READ[key]}/{kind}/{numbered(int(number))}{dot}{suffix}" if number.isdigit() else f"{READ[key]}/{key}"


@pytest.fixture
def store() -> Store:
    """Three shards done, one failed and claimed again by a worker that speaks, and a training with its curve."""
    store = Store.open("memory://dash-damaged")
    for info in store.list():
        store.delete(info.key)
    board, shards = Board(store, "demo"), [f"s{number}" for number in range(6)]
    board.bind({"shards": 6, "target": "abc"})

    def claim(worker: str) -> Any:
        lease = board.claim(shards, worker)
        assert lease is not None
        return lease

    for number in range(3):
        lease = claim(f"w{number}")
        board.objects.put(board.data_key(lease), b"data")
        assert board.commit(lease, size=4, sha256="", tokens=100, extra={"node": "n0"})
    lease = claim("w8")
    board.fail(lease, "no reason")
    board.release(lease)
    lease = claim("w9")
    board.present("w9", {"node": "n1", "ttl_s": 600, "device": "cuda:0", "held": {lease.shard: 40}, "gpus": [GPU]})
    rows: list[dict[str, Any]] = [
        {"step": step, "loss": 2.0 / step, "lr": 0.1, "tokens_per_s": 5.0, "seconds": float(step), "accuracy": [0.5]}
        for step in range(1, 5)
    ]
    rows.append({"step": 4, "evaluation": {"chain": 2.5, "tree": {"micro": 3.0}}})
    store.put(full_key(CURVE), "".join(json.dumps(row) + "\n" for row in rows).encode())
    said = {"state": "training", "step": 4, "steps": 20, "tokens": 400, "loss": 0.5, "node": "n2", "job": "train"}
    store.put(full_key(PROGRESS), json.dumps(said).encode())
    return store


def looked_at(store: Store) -> Snapshot:
    """What a page that was started just now knows, once every view of it was shown and every number was one."""
    settings = DashSettings(stores=(store.url,))
    snapshot = Collector(settings).refresh_now()
    page = create_app(lambda: snapshot, settings).test_client()
    views = ["", *(view for view in ("fleet", "jobs", "extraction", "training", "serving", "stores"))]
    views += [f"extraction/{keys.extraction(snapshot, run)}" for run in snapshot.extractions]
    views += [f"training/{keys.training(snapshot, run)}" for run in snapshot.trainings]
    views += [f"fleet/{node.name}" for node in snapshot.nodes]
    assert {view: page.get(f"/{view}").status_code for view in views} == dict.fromkeys(views, 200)
    samples = [line.rpartition(" ")[2] for line in page.get("/metrics").text.splitlines() if not line.startswith("#")]
    assert not {"inf", "-inf", "nan"} & set(samples)
    json.dumps(snapshot.as_dict(), allow_nan=False)
    assert Snapshot.model_validate_json(snapshot.model_dump_json()) == snapshot, "a page that is started anew reads it"
    return snapshot


def damaged(snapshot: Snapshot) -> list[str]:
    return [one for run in (*snapshot.extractions, *snapshot.trainings) for one in run.damaged]


def fields(store: Store, key: str) -> Iterator[tuple[str, bytes]]:
    """The object with something odd in one field, each in turn."""
    said = json.loads(store.get(full_key(key)))
    for field in said:
        for odd in ODD:
            yield field, json.dumps({**said, field: odd}).encode()


def test_a_whole_store_has_nothing_damaged(store: Store) -> None:
    snapshot = looked_at(store)
    [run], [training] = snapshot.extractions, snapshot.trainings
    assert (run.shards, run.done, run.leased, run.tokens, run.failures_total) == (6, 3, 1, 300, 1)
    assert (training.step, training.steps, len(training.series[0].x), training.evaluations[0].tree) == (4, 20, 4, 3.0)
    assert damaged(snapshot) == []
    assert "damaged" not in summary(snapshot)


@pytest.mark.parametrize("body", RUBBISH, ids=range(len(RUBBISH)))
@pytest.mark.parametrize("key", READ)
def test_it_is_named_and_everything_else_is_shown(store: Store, key: str, body: bytes) -> None:
    store.put(full_key(key), body)
    snapshot = looked_at(store)
    [run], [training] = snapshot.extractions, snapshot.trainings
    [sentence] = damaged(snapshot)
    assert f"{full_key(key)}: " in sentence
    assert f"is damaged: {sentence}" in summary(snapshot)
    assert [one.known.error for one in (run, training)] == [None, None]
    assert (run.shards, run.done, run.leased) == (4 if key == SPEC else 6, 3, 1)
    assert (run.tokens, run.failures_total) == (200 if key == MARKER else 300, 0 if key == FAILED else 1)
    assert not run.complete
    assert any(worker.alive and worker.shards == ("s3",) for worker in run.workers)
    assert training.steps == (None if key == PROGRESS else 20)
    assert training.step == 4
    assert len(training.series) == (0 if key == CURVE else 6)


@pytest.mark.parametrize("key", [key for key in READ if key != CURVE])
def test_a_field_of_another_type_hides_nothing_else(store: Store, key: str, caplog: pytest.LogCaptureFixture) -> None:
    for field, body in fields(store, key):
        store.put(full_key(key), body)
        snapshot = looked_at(store)
        [run], [training] = snapshot.extractions, snapshot.trainings
        assert [one.known.error for one in (run, training)] == [None, None], field
        assert (run.done, run.leased, len(training.series)) == (3, 1, 6), field
        assert all(full_key(key) in sentence for sentence in damaged(snapshot))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    ("key", "field", "odd"),
    [
        (SPEC, "shards", 10**12),
        (SPEC, "shards", "6"),
        (MARKER, "tokens", 10**400),
        (MARKER, "size", 1e400),
        (WORDS, "ttl_s", 1e12),
        (WORDS, "held", {"s3": "many"}),
        (WORDS, "gpus", [{**GPU, "power_w": "hot"}]),
        (PROGRESS, "step", 1e400),
        (PROGRESS, "steps", True),
        (FAILED, "reason", None),
        (LEASE, "worker", 7),
    ],
)
def test_a_field_that_is_read_is_named(store: Store, key: str, field: str, odd: Any) -> None:
    body = json.loads(store.get(full_key(key)))
    store.put(full_key(key), json.dumps(body | {field: odd}).encode())
    [sentence] = damaged(looked_at(store))
    assert f"{full_key(key)}: this" in sentence


@pytest.mark.parametrize("odd", ["NaN", "1e400", "-1e400", "1" + "0" * 400, '"x"', "[1]", "{}", "true"])
@pytest.mark.parametrize("field", ["loss", "lr", "seconds", "accuracy", "tokens_per_s", "unheard_of"])
def test_a_row_that_holds_something_odd_leaves_a_gap(store: Store, field: str, odd: str) -> None:
    whole = store.get(full_key(CURVE))
    store.put(full_key(CURVE), whole + f'{{"step": 5, "{field}": {odd}}}\n'.encode())
    [training] = looked_at(store).trainings
    assert (training.step, training.damaged) == (5, ())


@pytest.mark.parametrize("row", ["", "{", "[1]", '{"step": 1e400}', '{"step": "5"}', '{"loss": 1}', '{"step": null}'])
def test_a_line_that_is_no_row_is_named(store: Store, row: str) -> None:
    store.put(full_key(CURVE), store.get(full_key(CURVE)) + f"{row}\n".encode() + b'{"step": 6, "loss": 1}\n')
    [training] = looked_at(store).trainings
    [sentence] = training.damaged
    assert f"{full_key(CURVE)}: line 6 is no row of a training; " in sentence
    assert (training.step, training.loss, len(training.evaluations)) == (6, 1.0, 1)


def test_a_gpu_that_tells_no_number_is_shown_without_it(store: Store) -> None:
    body = json.loads(store.get(full_key(WORDS)))
    gpus = [{**GPU, "utilization_percent": float("nan"), "temperature_c": float("inf")}]
    store.put(full_key(WORDS), json.dumps(body | {"gpus": gpus}).encode())
    snapshot = looked_at(store)
    [node] = [one for one in snapshot.nodes if one.name == "n1"]
    assert (node.gpus[0].utilization_percent, node.gpus[0].temperature_c, node.gpus[0].power_w) == (None, None, 10)
    assert damaged(snapshot) == []


def test_it_is_whole_again_when_it_is(store: Store) -> None:
    page, whole = Collector(DashSettings(stores=(store.url,))), store.get(full_key(MARKER))
    store.put(full_key(MARKER), b"{")
    assert len(damaged(page.refresh_now())) == 1
    store.put(full_key(MARKER), whole)
    snapshot = page.refresh_now()
    assert (damaged(snapshot), snapshot.extractions[0].tokens) == ([], 300)
