"""/metrics and the Grafana dashboard that is drawn from it."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import drafthouse.dash
from drafthouse.dash.model import (
    EvaluationView,
    ExtractionView,
    GpuView,
    JobView,
    Known,
    NodeView,
    ServerView,
    Snapshot,
    StoreView,
    TrainingView,
    WorkerView,
)
from drafthouse.dash.prometheus import CONTENT_TYPE, exposition

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
KNOWN = Known(asked=AT, answered=AT)
DASHBOARD = Path(drafthouse.dash.__file__).parent / "grafana" / "drafthouse.json"


def full() -> Snapshot:
    """A snapshot in which everything is told."""
    gpu = GpuView(
        index=0,
        name="NVIDIA H200",
        uuid="GPU-a",
        memory_mib=143771,
        used_mib=1024,
        utilization_percent=50,
        temperature_c=61,
        power_w=650,
        power_limit_w=700,
    )
    node = NodeView(
        name='n"1\\',
        state="answers",
        last_seen=AT,
        gpus=(gpu,),
        load_1min=1.5,
        cores=8,
        memory_bytes=2**30,
        memory_free_bytes=2**29,
        disk_bytes=2**40,
        disk_free_bytes=2**39,
    )
    job = JobView(name="extract", kind="extract", status="live", epoch=3, node="n1", since=AT, locked_by="someone")
    worker = WorkerView(worker="w", node="n1", shards=("a",), tokens=5, age_s=2.0, done=7, waiting="disk")
    run = ExtractionView(
        run="states",
        store="file:///s",
        job="extract",
        known=KNOWN,
        shards=10,
        done=7,
        leased=1,
        stale=1,
        free=1,
        reclaims=2,
        tokens=700,
        bytes=4096,
        rate=12.5,
        shards_per_min=1,
        eta_s=180.0,
        grid="dddddrrls.",
        workers=(worker,),
        failures_total=4,
    )
    training = TrainingView(
        recipe="ours",
        store="file:///s",
        job=None,
        node=None,
        epoch=1,
        known=KNOWN,
        state="training",
        step=50,
        steps=100,
        tokens=5000,
        loss=0.5,
        resumed_from=None,
        age_s=1.0,
        eta_s=60.0,
        accuracy=(0.5, 0.25),
        evaluations=(EvaluationView(step=40, chain=2.5, tree=None),),
        latest={"lr": 1e-3, "noise": 0.1, "mean_streak": 1.5, "tokens_per_s": 1000.0},
    )
    server = ServerView(
        name="qwen",
        url="http://10.0.0.1:30000",
        job=None,
        engine="sglang",
        model="qwen",
        known=KNOWN,
        up=True,
        tokens_per_s=100.0,
        requests_per_s=2.0,
        ttft_p50_s=0.1,
        ttft_p95_s=0.2,
        acceptance_length=3.0,
        running=4,
        waiting=1,
        cache_used=0.5,
    )
    store = StoreView(url="file:///s", known=Known(asked=AT, error="gone"), up=False, latency_ms=5.0, free_bytes=100)
    return Snapshot(
        at=AT,
        sequence=1,
        fleet=KNOWN,
        nodes=(node,),
        jobs=(job,),
        extractions=(run,),
        trainings=(training,),
        servers=(server,),
        stores=(store,),
    )


def samples(snapshot: Snapshot) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, sorted labels) -> value, as Prometheus reads them; every series once."""
    found = {}
    for family in text_string_to_metric_families(exposition(snapshot).decode()):
        assert family.documentation, f"{family.name} has HELP"
        assert family.type in {"gauge", "counter"}, f"{family.name} has TYPE"
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, "a series that is there twice makes Prometheus refuse the page"
            found[key] = sample.value
    return found


def value(snapshot: Snapshot, name: str, **labels: str) -> float | None:
    matching = [
        number
        for (known, pairs), number in samples(snapshot).items()
        if known == name and labels.items() <= dict(pairs).items()
    ]
    assert len(matching) <= 1
    return matching[0] if matching else None


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("drafthouse_snapshot_timestamp_seconds", {}, AT.timestamp()),
        ("drafthouse_source_up", {"kind": "store"}, 0),
        ("drafthouse_source_up", {"kind": "run"}, 1),
        ("drafthouse_node_up", {"node": 'n"1\\'}, 1),
        ("drafthouse_node_memory_available_bytes", {}, 2**29),
        ("drafthouse_gpu_utilization_ratio", {"gpu": "0", "uuid": "GPU-a"}, 0.5),
        ("drafthouse_gpu_memory_used_bytes", {}, 2**30),
        ("drafthouse_gpu_power_limit_watts", {}, 700),
        ("drafthouse_job_live", {"job": "extract"}, 1),
        ("drafthouse_job_locked", {}, 1),
        ("drafthouse_extraction_shards", {"state": "stale"}, 1),
        ("drafthouse_extraction_shards", {"state": "done"}, 7),
        ("drafthouse_extraction_tokens_total", {"run": "states"}, 700),
        ("drafthouse_extraction_reclaims_total", {}, 2),
        ("drafthouse_extraction_failures_total", {}, 4),
        ("drafthouse_extraction_tokens_per_second", {}, 12.5),
        ("drafthouse_worker_shards_total", {"worker": "w"}, 7),
        ("drafthouse_worker_waiting", {}, 1),
        ("drafthouse_training_step", {"recipe": "ours"}, 50),
        ("drafthouse_training_acceptance_length_tokens", {}, 2.5),
        ("drafthouse_training_accuracy_ratio", {"slot": "2"}, 0.25),
        ("drafthouse_training_learning_rate", {}, 1e-3),
        ("drafthouse_server_time_to_first_token_p95_seconds", {"server": "qwen", "engine": "sglang"}, 0.2),
        ("drafthouse_server_acceptance_length_tokens", {}, 3.0),
        ("drafthouse_store_up", {"store": "file:///s"}, 0),
        ("drafthouse_store_latency_seconds", {}, 0.005),
    ],
)
def test_what_is_told(name: str, labels: dict[str, str], expected: float) -> None:
    assert value(full(), name, **labels) == pytest.approx(expected)


def test_what_nobody_could_tell_has_no_sample() -> None:
    run = full().extractions[0].model_copy(update={"rate": None, "eta_s": None})
    node = NodeView(name="n", state="unknown", last_seen=None)
    snapshot = full().model_copy(update={"extractions": (run,), "nodes": (node,)})
    assert value(snapshot, "drafthouse_extraction_tokens_per_second") is None
    assert value(snapshot, "drafthouse_node_load1") is None
    assert value(snapshot, "drafthouse_node_up") == 0
    assert value(snapshot, "drafthouse_extraction_tokens_total") == 700


def test_an_empty_snapshot_is_a_page() -> None:
    found = samples(Snapshot(at=AT, sequence=0, fleet=Known()))
    assert [name for name, _ in found] == ["drafthouse_snapshot_timestamp_seconds"]
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def test_names_follow_the_conventions() -> None:
    for family in text_string_to_metric_families(exposition(full()).decode()):
        for sample in family.samples:
            assert re.fullmatch(r"drafthouse_[a-z0-9_]+", sample.name)
            assert sample.name.endswith("_total") == (family.type == "counter")
            assert not re.search(r"_(ms|mib|percent|milliseconds)(_|$)", sample.name), "base units"


def test_it_says_what_the_client_library_would_say() -> None:
    registry = CollectorRegistry()
    labels = ("node", "gpu", "uuid", "model")
    gauge = Gauge("drafthouse_gpu_power_watts", "Power draw of the board.", labels, registry=registry)
    gauge.labels('n"1\\', "0", "GPU-a", "NVIDIA H200").set(650)
    theirs = generate_latest(registry).decode().splitlines()
    assert theirs == [line for line in exposition(full()).decode().splitlines() if "gpu_power_watts" in line]


class TestDashboard:
    @pytest.fixture
    def board(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
        return found

    def test_every_expression_names_only_what_the_page_tells(self, board: dict[str, Any]) -> None:
        told: dict[str, set[str]] = {}
        for name, pairs in samples(full()):
            told.setdefault(name, set()).update(label for label, _ in pairs)
        used = set()
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                for name in re.findall(r"\bdrafthouse_\w+", target["expr"]):
                    assert name in told, f"{panel['title']}: {name}"
                    used.add(name)
                for name, labels in re.findall(r"(drafthouse_\w+)\{([^}]*)\}", target["expr"]):
                    asked = set(re.findall(r"(\w+)\s*=~?", labels))
                    assert asked <= told[name], f"{panel['title']}: {name} has no {asked - told[name]}"
                legends = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                names = re.findall(r"drafthouse_\w+", target["expr"])
                assert any(legends <= told[name] for name in names), f"{panel['title']}: {target['legendFormat']}"
        for variable in board["templating"]["list"][1:]:
            name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
            assert label in told[name]
        left_out = {name for name in told if name not in used}
        assert left_out <= {"drafthouse_training_tokens_total", "drafthouse_training_age_seconds"} | {
            name for name in told if name.startswith(("drafthouse_worker_", "drafthouse_server_requests_per"))
        }, "what is told is also drawn"

    def test_a_view_for_everything(self, board: dict[str, Any]) -> None:
        rows = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
        assert rows == ["Page and stores", "Fleet", "Jobs", "Extraction", "Training", "Serving"]
        assert board["schemaVersion"] >= 39
        ids = [panel["id"] for panel in board["panels"]]
        assert len(ids) == len(set(ids))
        assert all(panel["datasource"]["uid"] == "${datasource}" for panel in board["panels"] if panel["type"] != "row")

    def test_panels_do_not_overlap(self, board: dict[str, Any]) -> None:
        taken: dict[tuple[int, int], str] = {}
        for panel in board["panels"]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            for x in range(place["x"], place["x"] + place["w"]):
                for y in range(place["y"], place["y"] + place["h"]):
                    assert (x, y) not in taken, f"{panel['title']} lies on {taken.get((x, y))}"
                    taken[x, y] = panel["title"]
