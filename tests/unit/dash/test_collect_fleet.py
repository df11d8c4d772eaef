"""The fleet by its inventory, its records, its workers and probes over ssh."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from markupsafe import escape

from drafthouse.dash.attention import concerns
from drafthouse.dash.cli import summary
from drafthouse.dash.collect.merge import FRESH_S, merged
from drafthouse.dash.collector import Collector
from drafthouse.dash.model import ExtractionView, GpuView, JobView, Known, NodeView, Snapshot, WorkerView
from drafthouse.dash.settings import DashSettings
from drafthouse.dash.web import create_app
from drafthouse.fleet.inventory import Inventory
from drafthouse.fleet.records import Life, Records
from drafthouse.store import Board, Lock, Store
from tests.doubles.engine_metrics import engine_double
from tests.doubles.nodes import Fleet, missing
from tests.ports import free_port
from tests.unit.dash.test_collector import tree

PROFILES = Path(__file__).parents[3] / "inventory" / "profiles"
PROFILE = "qwen3.6-27b-dflash-a6000x2"
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def life(job: str, epoch: int, kind: str = "extract", node: str = "n1") -> Life:
    return Life(
        job=job,
        epoch=epoch,
        node=node,
        kind=kind,
        runtime="process",
        image=None,
        digest="d",
        spec={},
        action="deploy",
        replaces=None,
        who="someone",
        grace_s=1.0,
    )


class Folder:
    """An inventory with a store, two nodes that do not answer, and jobs."""

    def __init__(self, path: Path) -> None:
        self.path, self.store = path, path.parent / "store"
        for name in ("group_vars", "jobs", "profiles"):
            (path / name).mkdir(parents=True)
        hosts = {"n1": {"ansible_host": "127.0.0.1", "ansible_port": free_port()}, "n2": {"ansible_host": "192.0.2.1"}}
        self.write("hosts.yml", {"all": {"hosts": hosts}})
        self.write("group_vars/all.yml", {"ansible_user": "root", "fleet_store": str(self.store)})
        (path / "known_hosts").touch()
        self.job("extract", kind="extract", venv="/opt/v", command=["true"], run="states")
        self.records = Records(Store.open(str(self.store)).child("fleet"))

    def write(self, name: str, values: Any) -> None:
        (self.path / name).write_text(yaml.safe_dump(values))

    def job(self, name: str, **values: Any) -> None:
        self.write(f"jobs/{name}.yml", {"name": name, "node": "n1", **values})


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "inventory")


def collector(folder: Folder, **more: Any) -> Collector:
    return Collector(DashSettings(inventory=folder.path, **more))


def test_jobs_and_lives_as_recorded(folder: Folder) -> None:
    folder.records.begin(life("extract", 1))
    folder.records.mark_live("extract", 1, "a shard")
    folder.records.end("extract", 1, "lost", "the node is gone")
    folder.records.begin(life("extract", 2, node="n2"))
    folder.records.begin(life("old", 7, kind="train"))
    folder.records.end("old", 7, "finished", "done")
    lock = Lock(Store.open(str(folder.store)).child("fleet"), "extract")
    with lock.acquire("an operator", "migrate"):
        snapshot = collector(folder).refresh_now()
    extract, old = snapshot.jobs
    assert (extract.name, extract.kind, extract.status, extract.epoch, extract.node) == (
        "extract",
        "extract",
        "starting",
        2,
        "n2",
    )
    assert extract.locked_by == "an operator"
    assert [(one.epoch, one.status, one.reason) for one in extract.lives] == [
        (2, "starting", None),
        (1, "lost", "the node is gone"),
    ]
    assert (old.status, old.epoch, old.kind) == ("over", None, "train")
    assert snapshot.fleet.error is None
    assert snapshot.settled, "probes may be off"
    assert [(node.name, node.state, node.jobs) for node in snapshot.nodes] == [
        ("n1", "unknown", ()),
        ("n2", "unknown", ("extract",)),
    ]


def test_a_jobs_run_is_found_in_the_fleets_store(folder: Folder) -> None:
    board = Board(Store.open(str(folder.store)), "states")
    board.bind({"shards": 2, "target": "t"})
    board.present("w", {"node": "n1", "ttl_s": 600.0})
    before = tree(folder.store)
    snapshot = collector(folder).refresh_now()
    [run] = snapshot.extractions
    assert (run.run, run.job) == ("states", "extract")
    assert (snapshot.nodes[0].name, snapshot.nodes[0].state) == ("n1", "answers")
    assert snapshot.nodes[0].jobs == ("extract",)
    assert tree(folder.store) == before, "the fleet's store is only read"


def test_a_served_job_is_asked_where_it_runs(folder: Folder) -> None:
    shutil.copy(PROFILES / f"{PROFILE}.yml", folder.path / "profiles")
    with engine_double("sglang") as engine:
        port = int(engine.url.rpartition(":")[2])
        folder.job("serve", kind="serve", venv="/opt/v", profile=PROFILE, port=port)
        page = collector(folder)
        assert page.refresh_now().servers == (), "it was never begun"
        folder.records.begin(life("serve", 1, kind="serve"))
        [server] = page.refresh_now().servers
        assert (server.name, server.job, server.up, server.engine) == ("serve", "serve", True, "sglang")
        assert server.url == engine.url
        folder.records.end("serve", 1, "stopped", "enough")
        assert page.refresh_now().servers == ()


def test_the_inventory_is_read_again_when_it_changes(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    page = collector(folder)
    page.refresh_now()
    read: list[Path] = []
    load = Inventory.load

    def counted(path: Path) -> Inventory:
        read.append(path)
        return load(path)

    monkeypatch.setattr(Inventory, "load", counted)
    page.refresh_now()
    assert read == [], "Ansible takes a second"
    folder.job("another", kind="command", venv="/opt/v", command=["true"], store=None)
    assert [job.name for job in page.refresh_now().jobs] == ["another", "extract"]
    assert len(read) == 1


def test_a_wrong_job_file_hides_nothing_else(folder: Folder) -> None:
    folder.job("odd", kind="command", surprise=1)
    folder.records.begin(life("extract", 1))
    snapshot = collector(folder).refresh_now()
    assert "unknown key 'surprise'" in str(snapshot.fleet.error)
    assert [job.name for job in snapshot.jobs] == ["extract"]
    assert [node.name for node in snapshot.nodes] == ["n1", "n2"]


def test_a_records_store_that_cannot_be_read_hides_neither_jobs_nor_nodes(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    folder.write("group_vars/all.yml", {"fleet_store": "s3://bucket/fleet?endpoint=http://127.0.0.1:9"})
    snapshot = collector(folder).refresh_now()
    assert "no S3 credentials" in str(snapshot.fleet.error)
    assert [(job.name, job.status) for job in snapshot.jobs] == [("extract", "unknown")]
    assert [node.name for node in snapshot.nodes] == ["n1", "n2"]
    [store] = snapshot.stores
    assert (store.url, store.up) == ("s3://bucket/fleet", False)


@pytest.mark.parametrize(
    ("key", "body"),
    [
        ("lives/extract/000002", b"{cut"),
        ("lives/extract/000002", b"[" * 100_000),
        ("live/extract/000002", b'{"evidence": 3}'),
        ("ends/extract/000001", b"{}"),
    ],
)
def test_a_damaged_record_is_named_and_says_nothing_against_the_others(folder: Folder, key: str, body: bytes) -> None:
    for epoch in (1, 2):
        folder.records.begin(life("extract", epoch, node=f"n{epoch}"))
        folder.records.mark_live("extract", epoch, "a shard")
    folder.records.end("extract", 1, "retired", "moved")
    folder.records.begin(life("other", 1, kind="train"))
    folder.records.mark_live("other", 1, "a step")
    whole = folder.records.objects.get(key)
    folder.records.objects.put(key, body)
    page = collector(folder)
    snapshot = page.refresh_now()
    assert snapshot.fleet.error is None
    extract, other = snapshot.jobs
    assert (other.name, other.status, other.damaged) == ("other", "live", ())
    assert (extract.status, extract.epoch, extract.kind) == ("unknown", None, "extract")
    assert [one.epoch for one in extract.lives] == [1 if "2" in key else 2], "the other life is shown"
    [sentence] = extract.damaged
    assert f"fleet/{key}: this" in sentence
    assert f"problem: extract is damaged: {sentence}" in summary(snapshot)
    words = create_app(lambda: snapshot, page.settings).test_client().get("/jobs").text
    assert str(escape(sentence)) in words
    assert "which life counts is not known" in words
    folder.records.objects.put(key, whole)
    [again, _] = page.refresh_now().jobs
    assert (again.status, again.epoch, again.damaged) == ("live", 2, ()), "what was damaged is asked for again"


def test_a_damaged_lock_says_nothing_against_its_job(folder: Folder) -> None:
    folder.records.begin(life("extract", 1))
    folder.records.objects.put("lock/extract/000001", b"")
    [job] = collector(folder).refresh_now().jobs
    assert (job.status, job.epoch, job.locked_by) == ("starting", 1, None)
    assert "lock/extract/000001: this object is not the JSON" in job.damaged[0]


def test_a_damaged_record_leaves_what_was_known_before_the_page_was_started(folder: Folder, tmp_path: Path) -> None:
    folder.records.begin(life("extract", 1))
    folder.records.mark_live("extract", 1, "a shard")
    with collector(folder, remember=tmp_path / "last.json", probe_s=0) as page:
        page.refresh_now()
    folder.records.objects.put("live/extract/000001", b"{")
    [job] = collector(folder, remember=tmp_path / "last.json", probe_s=0).refresh_now().jobs
    assert (job.status, job.epoch, job.node) == ("live", 1, "n1")
    assert len(job.damaged) == 1


def test_an_inventory_without_a_store_is_told(folder: Folder) -> None:
    folder.write("group_vars/all.yml", {"ansible_user": "root"})
    folder.job("extract", kind="command", venv="/opt/v", command=["true"], store=None)
    snapshot = collector(folder).refresh_now()
    assert "declares no store for the fleet's records" in str(snapshot.fleet.error)
    assert [(job.name, job.status) for job in snapshot.jobs] == [("extract", "unknown")]


def test_an_inventory_that_is_not_there(tmp_path: Path) -> None:
    board = Board(Store.open(str(tmp_path / "store")), "states")
    board.bind({"shards": 1})
    page = Collector(DashSettings(inventory=tmp_path / "none", stores=(str(tmp_path / "store"),)))
    snapshot = page.refresh_now()
    assert "there is no inventory" in str(snapshot.fleet.error)
    assert len(snapshot.extractions) == 1


def test_without_the_extra_the_rest_works(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing_package(name: str) -> Any:
        raise ModuleNotFoundError(name=name.rpartition(".")[2])

    monkeypatch.setattr("drafthouse.dash.collect.fleet.importlib.import_module", missing_package)
    board = Board(Store.open(str(folder.store)), "states")
    board.bind({"shards": 1})
    snapshot = collector(folder, stores=(str(folder.store),)).refresh_now()
    assert "pip install 'drafthouse[fleet]'" in str(snapshot.fleet.error)
    assert len(snapshot.extractions) == 1


def test_the_records_are_remembered_when_the_store_goes_away(folder: Folder) -> None:
    folder.records.begin(life("extract", 1))
    file = folder.path.parent / "known.json"
    with collector(folder, remember=file, probe_s=0) as page:
        page.refresh_now()
    shutil.rmtree(folder.store)
    folder.store.touch()
    snapshot = collector(folder, remember=file).refresh_now()
    assert [(job.name, job.status) for job in snapshot.jobs] == [("extract", "starting")]
    assert "a store is a directory, and this is a file" in str(snapshot.fleet.error)
    shutil.rmtree(folder.path)
    snapshot = collector(folder, remember=file).refresh_now()
    assert [(job.name, job.status) for job in snapshot.jobs] == [("extract", "starting")]
    assert "there is no inventory" in str(snapshot.fleet.error)
    assert snapshot.fleet.answered is not None


class TestProbes:
    @pytest.fixture
    def fleet(self, tmp_path: Path) -> Iterator[Fleet]:
        lacking = missing()
        if lacking is not None:
            pytest.skip(f"nodes need {lacking}")
        with Fleet(1, tmp_path / "fleet") as running:
            running.write_inventory(fleet_store=str(tmp_path / "store"))
            yield running

    def test_a_node_that_answers_dies_and_comes_back(self, fleet: Fleet) -> None:
        page = Collector(DashSettings(inventory=fleet.inventory))
        assert page.refresh_now().nodes[0].state == "unknown", "it was not asked"
        [node] = page.refresh_now(probes=True).nodes
        assert (node.name, node.state, node.error) == ("node1", "answers", None)
        assert node.cores is not None
        assert node.memory_bytes is not None
        assert node.memory_free_bytes is not None
        assert node.memory_bytes > node.memory_free_bytes > 0
        assert node.disk_free_bytes is not None
        assert node.last_seen is not None
        fleet.nodes[0].kill()
        [dead] = page.refresh_now(probes=True).nodes
        assert (dead.state, dead.last_seen, dead.cores) == ("silent", node.last_seen, node.cores)
        assert dead.error is not None
        assert "\n" not in dead.error
        fleet.nodes[0].restart()
        [back] = page.refresh_now(probes=True).nodes
        assert (back.state, back.error) == ("answers", None)


def test_a_node_that_never_answered_is_unknown(folder: Folder) -> None:
    folder.write("hosts.yml", {"all": {"hosts": {"n1": {"ansible_host": "127.0.0.1", "ansible_port": 1}}}})
    [node] = collector(folder).refresh_now(probes=True).nodes
    assert (node.state, node.last_seen) == ("unknown", None)
    assert node.error is not None


class TestMerging:
    def worker(self, age_s: float, **more: Any) -> ExtractionView:
        worker = WorkerView(worker="w", node="n1", shards=(), tokens=0, age_s=age_s, done=0, **more)
        known = Known(asked=NOW, answered=NOW)
        numbers = dict.fromkeys(("shards", "done", "leased", "stale", "free", "reclaims", "tokens", "bytes"), 0)
        rates = dict.fromkeys(("rate", "shards_per_min", "eta_s"))
        return ExtractionView.model_validate(
            {"run": "r", "store": "s", "job": "j", "known": known, **numbers, **rates, "grid": "", "workers": (worker,)}
        )

    def gpu(self, used: float, at: datetime, **more: Any) -> GpuView:
        return GpuView(index=0, name="H200", uuid="GPU-a", used_mib=used, at=at, **more)

    def test_a_worker_that_speaks_shows_that_its_node_lives(self) -> None:
        refused = NodeView(name="n1", state="silent", last_seen=NOW - timedelta(hours=1), error="ssh refused")
        [node] = merged({"n1": refused}, [self.worker(5.0)], (), None, NOW)
        assert (node.state, node.last_seen, node.error) == ("answers", NOW - timedelta(seconds=5), "ssh refused")
        assert node.jobs == ("j",)

    def test_words_of_long_ago_do_not(self) -> None:
        [node] = merged({}, [self.worker(FRESH_S + 1, alive=False)], (), None, NOW)
        assert (node.name, node.state, node.jobs) == ("n1", "silent", ())
        later = NOW + timedelta(hours=1)
        [node] = merged({}, [self.worker(1.0)], (), None, later)
        assert node.state == "silent", "what was read an hour ago is an hour old"

    def test_a_node_whose_work_is_over_is_no_problem(self) -> None:
        long_ago = self.worker(FRESH_S + 1, alive=False)
        for over in (
            long_ago.model_copy(update={"shards": 2, "done": 2, "complete": True}),
            self.worker(FRESH_S + 1, alive=False, ended=True),
        ):
            [node] = merged({}, [over], (), None, NOW)
            assert (node.state, node.last_seen) == ("finished", NOW - timedelta(seconds=FRESH_S + 1))
            assert not list(concerns(Snapshot(at=NOW, sequence=1, fleet=Known(), nodes=(node,))))
            [node] = merged({}, [over, long_ago], (), None, NOW)
            assert node.state == "silent", "other work on it should be heard"

    def test_of_two_readings_of_a_gpu_the_newer_counts(self) -> None:
        probed = self.gpu(1.0, NOW - timedelta(seconds=60), job="serve")
        node = NodeView(name="n1", state="answers", last_seen=NOW, gpus=(probed,))
        told = self.gpu(2.0, NOW, source="heartbeat")
        [shown] = merged({"n1": node}, [self.worker(1.0, gpus=(told,))], (), None, NOW)
        [gpu] = shown.gpus
        assert (gpu.used_mib, gpu.source, gpu.job) == (2.0, "heartbeat", "serve")

    def test_this_machine_is_a_node_if_it_has_gpus(self) -> None:
        here = NodeView(name="me", state="answers", last_seen=NOW, gpus=(self.gpu(1.0, NOW, source="local"),))
        job = JobView(name="j", kind="train", status="live", epoch=1, node="me", since=NOW)
        [node] = merged({}, (), [job], here, NOW)
        assert (node.name, node.jobs, node.gpus[0].source) == ("me", ("j",), "local")
