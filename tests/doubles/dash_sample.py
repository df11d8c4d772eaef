"""Snapshots as a collector would make them, with example names: a busy fleet, a huge one, one full of hostile names."""

from __future__ import annotations

import hashlib
import math
import random
from datetime import UTC, datetime, timedelta

from drafthouse.dash.model import (
    EvaluationView,
    ExtractionView,
    FailureView,
    GpuView,
    JobView,
    Known,
    LifeView,
    NodeView,
    Series,
    ServerView,
    Snapshot,
    StoreView,
    TrainingView,
    WorkerView,
)

STORE = "s3://states/qwen?endpoint=http://192.0.2.10:8333"
HOSTILE = "<script>alert('x')</script>\"&"


def sample(at: datetime | None = None, *, sequence: int = 1) -> Snapshot:
    """A fleet in the middle of its work: one node silent, one worker killed, one waiting, one server down."""
    at = at or datetime.now(UTC)
    known = Known(asked=at, answered=at - timedelta(seconds=1))
    return Snapshot(
        at=at,
        sequence=sequence,
        fleet=known,
        nodes=_nodes(at),
        jobs=_jobs(at),
        extractions=(_extraction(at, known), _finished_extraction(at, known)),
        trainings=(_training(at, known), _silent_training(at, known)),
        servers=_servers(at, known),
        stores=(
            StoreView(url=STORE, known=known, up=True, latency_ms=3.8, runs=("qwen-800k",), recipes=("ours",)),
            StoreView(
                url="file:/srv/drafthouse/demo",
                known=known,
                up=True,
                latency_ms=0.2,
                free_bytes=812_000_000_000,
                runs=("demo",),
                recipes=("baseline",),
            ),
            StoreView(
                url="s3://attic?endpoint=http://192.0.2.11:8333",
                known=Known(
                    asked=at, answered=at - timedelta(minutes=41), error="connection refused by 192.0.2.11:8333"
                ),
                up=False,
            ),
        ),
    )


def empty(at: datetime | None = None) -> Snapshot:
    """Nothing was found anywhere."""
    return Snapshot(at=at or datetime.now(UTC), sequence=1, fleet=Known())


def hostile(at: datetime | None = None) -> Snapshot:
    """Every name that a source chooses is markup."""
    whole = sample(at)
    node = whole.nodes[0].model_copy(update={"name": HOSTILE, "error": HOSTILE, "driver": HOSTILE, "jobs": (HOSTILE,)})
    life = whole.jobs[0].lives[0].model_copy(update={"who": HOSTILE, "reason": HOSTILE, "node": HOSTILE})
    job = whole.jobs[0].model_copy(update={"name": HOSTILE, "locked_by": HOSTILE, "lives": (life,), "node": HOSTILE})
    run = whole.extractions[0]
    failures = (FailureView(shard=HOSTILE, epoch=1, worker=HOSTILE, at=None, reason=HOSTILE),)
    worker = run.workers[0].model_copy(update={"worker": HOSTILE, "device": HOSTILE, "waiting": HOSTILE})
    run = run.model_copy(
        update={
            "run": HOSTILE,
            "store": HOSTILE,
            "failures": failures,
            "workers": (worker,),
            "names": (HOSTILE, *run.names[1:]),
        }
    )
    series = whole.trainings[0].series[0].model_copy(update={"name": HOSTILE, "unit": HOSTILE})
    training = whole.trainings[0].model_copy(
        update={"recipe": HOSTILE, "series": (series,), "latest": {HOSTILE: 1.0}, "known": Known(error=HOSTILE)}
    )
    server = whole.servers[0].model_copy(update={"name": HOSTILE, "url": HOSTILE, "model": HOSTILE})
    return whole.model_copy(
        update={
            "nodes": (node,),
            "jobs": (job,),
            "extractions": (run,),
            "trainings": (training,),
            "servers": (server,),
            "stores": (StoreView(url=HOSTILE, known=Known(error=HOSTILE), up=False),),
            "fleet": Known(error=HOSTILE),
        }
    )


def large(nodes: int = 200, shards: int = 10_000, at: datetime | None = None) -> Snapshot:
    """Many nodes of eight GPUs, a worker on each, and a run of many shards in every state."""
    at, draw = at or datetime.now(UTC), random.Random(4)
    known = Known(asked=at, answered=at)
    grid = "".join(draw.choices("drls", weights=(60, 4, 4, 1), k=int(shards * 0.7))).ljust(shards, ".")
    names = tuple(hashlib.sha256(str(n).encode()).hexdigest() for n in range(int(shards * 0.7)))
    workers = tuple(
        _worker(f"node{n:03d}-{n}", f"node{n:03d}", names[n : n + 1], done=draw.randint(10, 50)) for n in range(nodes)
    )
    failures = tuple(
        FailureView(shard=names[n], epoch=1, worker=f"node{n:03d}-0", at=at, reason="fell silent for 120 s")
        for n in range(min(200, len(names)))
    )
    steps = tuple(float(10 * n) for n in range(600))
    curves = tuple(
        Series(name=f"figure {n}", unit="tokens", unit_x="step", x=steps, y=tuple(draw.random() for _ in steps))
        for n in range(14)
    )
    return Snapshot(
        at=at,
        sequence=7,
        fleet=known,
        nodes=tuple(
            NodeView(
                name=f"node{n:03d}",
                state="silent" if n % 40 == 7 else "answers",
                last_seen=at - timedelta(seconds=n % 30),
                error="no route to host" if n % 40 == 7 else None,
                gpus=tuple(_gpu(index, at, draw) for index in range(8)),
                jobs=("extract-qwen",),
            )
            for n in range(nodes)
        ),
        jobs=tuple(_jobs(at)[0].model_copy(update={"name": f"job{n:03d}"}) for n in range(nodes)),
        extractions=(
            _extraction(at, known).model_copy(
                update={
                    "grid": grid,
                    "names": names,
                    "shards": shards,
                    "done": grid.count("d") + grid.count("r"),
                    "leased": grid.count("l"),
                    "stale": grid.count("s"),
                    "free": grid.count("."),
                    "workers": workers,
                    "failures": failures,
                    "failures_total": 1234,
                }
            ),
        ),
        trainings=tuple(
            _training(at, known).model_copy(update={"recipe": f"recipe{n}", "series": curves}) for n in range(8)
        ),
        servers=tuple(_servers(at, known)[0].model_copy(update={"name": f"server{n}"}) for n in range(20)),
        stores=(StoreView(url=STORE, known=known, up=True, latency_ms=4.0),),
    )


def _gpu(index: int, at: datetime, draw: random.Random, name: str = "NVIDIA H200", job: str | None = None) -> GpuView:
    memory = 143_771.0 if "H200" in name else 49_140.0
    limit = 700.0 if "H200" in name else 300.0
    load = draw.uniform(70, 99) if job or draw.random() < 0.8 else 0.0
    return GpuView(
        index=index,
        name=name,
        memory_mib=memory,
        used_mib=memory * (draw.uniform(0.6, 0.93) if load else 0.01),
        utilization_percent=round(load),
        temperature_c=round(35 + load * 0.35 + draw.uniform(0, 5)),
        power_w=round(limit * (0.12 + 0.0075 * load)),
        power_limit_w=limit,
        job=job,
        at=at,
    )


def _node(name: str, at: datetime, gpus: tuple[GpuView, ...], jobs: tuple[str, ...], seed: int) -> NodeView:
    draw = random.Random(seed)
    return NodeView(
        name=name,
        state="answers",
        last_seen=at - timedelta(seconds=draw.randint(1, 20)),
        gpus=gpus,
        driver="580.95.05",
        load_1min=draw.uniform(2, 30),
        cores=64,
        memory_bytes=512 * 2**30,
        memory_free_bytes=draw.randint(100, 400) * 2**30,
        disk_bytes=3_840_000_000_000,
        disk_free_bytes=draw.randint(400, 2500) * 1_000_000_000,
        jobs=jobs,
    )


def _nodes(at: datetime) -> tuple[NodeView, ...]:
    draw = random.Random(1)
    extract, train, serve = "extract-qwen", "train-qwen", "serve-qwen"
    a6000 = "NVIDIA RTX A6000"
    hot = tuple(_gpu(n, at, draw, a6000, serve) for n in range(2))
    hot = (hot[0], hot[1].model_copy(update={"temperature_c": 88.0}))
    lost = _node("rented3", at, tuple(_gpu(n, at, draw, job=extract) for n in range(4)), (extract,), 3)
    return (
        _node("ct129", at, hot, (serve,), 5),
        _node("kpro5", at, tuple(_gpu(n, at, draw, a6000, train if n == 0 else None) for n in range(2)), (train,), 6),
        _node("rented1", at, tuple(_gpu(n, at, draw, job=extract) for n in range(4)), (extract,), 7),
        _node("rented2", at, tuple(_gpu(n, at, draw, job=extract) for n in range(4)), (extract,), 8),
        lost.model_copy(
            update={
                "state": "silent",
                "last_seen": at - timedelta(minutes=7, seconds=12),
                "error": "no route to host 198.51.100.23 port 22",
            }
        ),
        NodeView(name="depot", state="answers", last_seen=at - timedelta(seconds=9), load_1min=0.4, cores=8),
        NodeView(name="spare", state="unknown", last_seen=None),
    )


def _jobs(at: datetime) -> tuple[JobView, ...]:
    def life(
        epoch: int, node: str, status: str, action: str, began_h: float, ended_h: float | None, told: str
    ) -> LifeView:
        begun = at - timedelta(hours=began_h)
        over = status not in ("live", "starting")
        return LifeView(
            epoch=epoch,
            node=node,
            status=status,
            action=action,
            who="operator@desk",
            begun=begun,
            live_since=None if status == "failed" else begun + timedelta(minutes=6),
            ended=None if ended_h is None else at - timedelta(hours=ended_h),
            evidence=None if over else told,
            reason=told if over else None,
        )

    return (
        JobView(
            name="extract-qwen",
            kind="extract",
            status="live",
            epoch=3,
            node="rented2",
            since=at - timedelta(hours=5),
            lives=(
                life(3, "rented2", "live", "recover", 5.1, None, "shard 4f1c committed after 212 s"),
                life(2, "rented3", "lost", "migrate", 22, 5.1, "the node did not answer for 300 s"),
                life(1, "rented1", "retired", "deploy", 41, 21.8, "replaced by epoch 2"),
            ),
        ),
        JobView(
            name="train-qwen",
            kind="train",
            status="live",
            epoch=1,
            node="kpro5",
            since=at - timedelta(hours=9),
            lives=(life(1, "kpro5", "live", "deploy", 9.1, None, "step 10 logged, loss 6.214"),),
        ),
        JobView(
            name="serve-qwen",
            kind="serve",
            status="live",
            epoch=4,
            node="ct129",
            since=at - timedelta(hours=2),
            lives=(
                life(4, "ct129", "live", "rollback", 2, None, "canary: 12 of 12 answers as declared"),
                life(3, "ct129", "failed", "deploy", 2.6, 2.1, "canary: acceptance length 1.04, below 1.5"),
                life(2, "kpro5", "retired", "migrate", 30, 2, "replaced by epoch 4"),
            ),
            locked_by="operator@desk",
        ),
        JobView(
            name="say-gpus",
            kind="command",
            status="failed",
            epoch=None,
            node=None,
            since=None,
            lives=(life(1, "rented3", "failed", "deploy", 0.4, 0.3, "exited with status 127 after 1 s"),),
        ),
    )


def _worker(
    name: str, node: str, shards: tuple[str, ...], *, done: int, waiting: str | None = None, alive: bool = True
) -> WorkerView:
    return WorkerView(
        worker=name,
        node=node,
        shards=shards,
        tokens=312_400 if shards else 0,
        age_s=2.1 if alive else 432.0,
        done=done,
        waiting=waiting,
        device="cuda:0",
        alive=alive,
    )


def _extraction(at: datetime, known: Known) -> ExtractionView:
    draw = random.Random(2)
    shards, begun = 1250, 820
    states = draw.choices("dr", weights=(96, 4), k=begun - 11) + list("lllllllssss")
    draw.shuffle(states)
    grid = "".join(states).ljust(shards, ".")
    names = tuple(hashlib.sha256(f"shard {n}".encode()).hexdigest() for n in range(begun))
    held = [name for name, state in zip(names, grid, strict=False) if state == "l"]
    lost = [name for name, state in zip(names, grid, strict=False) if state == "s"]
    seconds = [at.timestamp() - 3600 + 30 * n for n in range(121)]
    rates = [
        (41_000 if 40 < n < 55 else 62_000) + 4_000 * math.sin(n / 6) + draw.uniform(-2500, 2500) for n in range(121)
    ]
    reasons = (
        ("rented3-0", "fell silent for 120 s"),
        ("rented3-1", "fell silent for 120 s"),
        ("rented3-2", "fell silent for 120 s"),
        ("rented3-3", "fell silent for 120 s"),
        ("rented1-2", "out of GPU memory with 8 rows; the batch was halved to 4"),
        ("rented2-1", "the upload of shard.safetensors was refused: 503 Slow Down, 6 attempts"),
    )
    return ExtractionView(
        run="qwen-800k",
        store=STORE,
        job="extract-qwen",
        known=known,
        shards=shards,
        done=grid.count("d") + grid.count("r"),
        leased=grid.count("l"),
        stale=grid.count("s"),
        free=grid.count("."),
        reclaims=grid.count("r") + 2,
        tokens=613_000_000,
        bytes=37_700_000_000_000,
        rate=61_800.0,
        shards_per_min=4.9,
        eta_s=5 * 3600.0 + 240,
        grid=grid,
        names=names,
        workers=(
            *(_worker(f"rented1-{n}", "rented1", (held[n],), done=104 + n) for n in range(3)),
            _worker("rented1-3", "rented1", (), done=98, waiting="disk"),
            *(_worker(f"rented2-{n}", "rented2", (held[3 + n],), done=88 + n) for n in range(4)),
            *(_worker(f"rented3-{n}", "rented3", (lost[n],), done=61, alive=False) for n in range(4)),
        ),
        failures=tuple(
            FailureView(shard=names[3 * n], epoch=1, worker=worker, at=at - timedelta(minutes=6 * n + 7), reason=reason)
            for n, (worker, reason) in enumerate(reasons)
        ),
        failures_total=len(reasons),
        rates=Series(name="rate", unit="tokens/s", unit_x="time", x=tuple(seconds), y=tuple(rates)),
        target="Qwen3.6-27B, layers 1 16 31 46 61",
    )


def _finished_extraction(at: datetime, known: Known) -> ExtractionView:
    return ExtractionView(
        run="demo",
        store="file:/srv/drafthouse/demo",
        job=None,
        known=known,
        shards=12,
        done=12,
        leased=0,
        stale=0,
        free=0,
        reclaims=1,
        tokens=443_264,
        bytes=340_000_000,
        rate=None,
        shards_per_min=None,
        eta_s=None,
        grid="dddrdddddddd",
        names=tuple(hashlib.sha256(f"demo {n}".encode()).hexdigest() for n in range(12)),
        complete=True,
    )


def _training(at: datetime, known: Known) -> TrainingView:
    draw = random.Random(3)
    steps = tuple(float(20 * n) for n in range(321))
    last = int(steps[-1])

    def curve(name: str, unit: str, value: object) -> Series:
        assert callable(value)
        return Series(name=name, unit=unit, unit_x="step", x=steps, y=tuple(value(s / 10_000) for s in steps))

    loss = curve("loss", "nats", lambda t: 1.7 + 4.6 * math.exp(-9 * t) + draw.uniform(-0.09, 0.09))
    streak = curve("mean streak", "tokens", lambda t: 3.4 * (1 - math.exp(-4 * t)) + draw.uniform(-0.08, 0.08))
    pace = curve("tokens/s", "tokens/s", lambda t: 38_000 + draw.uniform(-1500, 1500))
    return TrainingView(
        recipe="ours",
        store=STORE,
        job="train-qwen",
        node="kpro5",
        epoch=1,
        known=known,
        state="training",
        step=last,
        steps=10_000,
        tokens=210_000_000,
        loss=loss.y[-1],
        resumed_from=4000,
        age_s=3.0,
        eta_s=3 * 3600 + 1500.0,
        accuracy=(0.83, 0.71, 0.62, 0.55, 0.49, 0.44, 0.40, 0.37, 0.34, 0.31, 0.29, 0.27, 0.25, 0.24, 0.22),
        evaluations=tuple(
            EvaluationView(step=s, chain=1 + 2.4 * (1 - math.exp(-s / 2600)), tree=1 + 3.5 * (1 - math.exp(-s / 2500)))
            for s in range(500, last + 1, 500)
        ),
        series=(
            loss,
            streak,
            curve("expected streak", "tokens", lambda t: 3.2 * (1 - math.exp(-4 * t)) + draw.uniform(-0.03, 0.03)),
            curve("learning rate", "", lambda t: 6e-4 * min(1, t / 0.04) * 0.5 * (1 + math.cos(math.pi * t))),
            curve("noise", "", lambda t: 0.3 * (1 - t)),
            pace,
            curve("MFU", "%", lambda t: 41 + draw.uniform(-1.5, 1.5)),
            curve("GPU utilisation", "%", lambda t: 95 + draw.uniform(-4, 3)),
            curve("GPU memory", "GiB", lambda t: 42.6),
        ),
        latest={
            "loss": loss.y[-1] or 0.0,
            "lr": 1.72e-4,
            "noise": 0.108,
            "mean_streak": streak.y[-1] or 0.0,
            "tokens_per_s": pace.y[-1] or 0.0,
        },
    )


def _silent_training(at: datetime, known: Known) -> TrainingView:
    steps = tuple(float(n) for n in range(0, 401, 4))
    loss = tuple(3 + 3 * math.exp(-s / 90) for s in steps)
    return TrainingView(
        recipe="baseline",
        store="file:/srv/drafthouse/demo",
        job=None,
        node=None,
        epoch=1,
        known=Known(asked=at, answered=at),
        state="silent",
        step=400,
        steps=1200,
        tokens=3_100_000,
        loss=loss[-1],
        resumed_from=None,
        age_s=1860.0,
        eta_s=None,
        accuracy=(0.51, 0.33, 0.2),
        series=(Series(name="loss", unit="nats", unit_x="step", x=steps, y=loss),),
    )


def _servers(at: datetime, known: Known) -> tuple[ServerView, ...]:
    seconds = tuple(at.timestamp() - 1800 + 15 * n for n in range(121))
    draw = random.Random(9)

    def curve(name: str, unit: str, middle: float, swing: float, gap: bool = False) -> Series:
        y = [middle + swing * math.sin(n / 9) + draw.uniform(-swing, swing) / 3 for n in range(121)]
        return Series(
            name=name,
            unit=unit,
            unit_x="time",
            x=seconds,
            y=tuple(None if gap and 50 < n < 58 else value for n, value in enumerate(y)),
        )

    return (
        ServerView(
            name="serve-qwen",
            url="http://192.0.2.20:30000",
            job="serve-qwen",
            engine="SGLang 0.5.4",
            model="qwen3.6-27b",
            known=known,
            up=True,
            tokens_per_s=1412.0,
            requests_per_s=3.2,
            ttft_p50_s=0.212,
            ttft_p95_s=0.94,
            acceptance_length=4.31,
            running=14,
            waiting=2,
            cache_used=0.62,
            series=(
                curve("tokens/s", "tokens/s", 1400, 300, gap=True),
                curve("TTFT p95", "s", 0.9, 0.3),
                curve("acceptance length", "tokens a pass", 4.2, 0.2),
                curve("waiting", "requests", 3, 2.5),
                curve("KV cache", "%", 60, 15),
            ),
        ),
        ServerView(
            name="canary",
            url="http://192.0.2.21:8000",
            job=None,
            engine="vLLM",
            model="qwen3.6-27b",
            known=Known(asked=at, answered=at - timedelta(minutes=12), error="connection refused"),
            up=False,
        ),
    )
