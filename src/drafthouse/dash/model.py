"""What the page knows: one immutable `Snapshot`, made by the collector, shown by the pages and by /metrics.

Every part says when it was last true (`Known`): a source that fails keeps its last values and gains an error, so the
page still shows the last known truth when every node is gone. Times are aware datetimes in UTC. None is what nobody
could tell.
"""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Part(BaseModel):
    """Base of everything in a snapshot; it survives a restart of the page as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Told(Part):
    """Base of what holds numbers that others told: what is not finite can be neither drawn nor compared, so it is what
    nobody could tell."""

    @model_validator(mode="before")
    @classmethod
    def _finite(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        wild = {name: None for name, one in values.items() if isinstance(one, float) and not math.isfinite(one)}
        return {**values, **wild} if wild else values


class Known(Part):
    """When a source was last asked, when it last answered (what is shown beside it is as of then), and in one
    sentence why it does not answer now (None: it does)."""

    asked: datetime | None = None
    answered: datetime | None = None
    error: str | None = None


class GpuView(Told):
    """One GPU; `source` says who told: a probe over ssh, a worker's heartbeat, or this machine's own NVML."""

    index: int
    name: str
    uuid: str | None = None
    memory_mib: float | None = None
    used_mib: float | None = None
    utilization_percent: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    job: str | None = Field(None, description="the one of ours that computes on it")
    source: Literal["probe", "heartbeat", "local"] = "probe"
    at: datetime | None = None


class NodeView(Told):
    """A node. "silent": it answered once and does not now, although it should; "finished": only its workers told of it,
    and their work is over; "unknown": it was never asked or never answered."""

    name: str
    state: Literal["answers", "silent", "finished", "unknown"]
    last_seen: datetime | None
    error: str | None = None
    gpus: tuple[GpuView, ...] = ()
    driver: str | None = None
    load_1min: float | None = None
    cores: float | None = None
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    disk_bytes: int | None = None
    disk_free_bytes: int | None = None
    jobs: tuple[str, ...] = ()


class LifeView(Part):
    """One life of a job, as recorded."""

    epoch: int
    node: str
    status: str
    action: str
    who: str
    begun: datetime
    live_since: datetime | None = None
    ended: datetime | None = None
    evidence: str | None = None
    reason: str | None = None


class JobView(Part):
    """A job and the life that counts (`epoch`, `node`; None: it is over)."""

    name: str
    kind: str
    status: str
    epoch: int | None
    node: str | None
    since: datetime | None
    lives: tuple[LifeView, ...] = Field((), description="newest first")
    damaged: tuple[str, ...] = Field((), description="records that cannot be read; of a life: status is unknown")
    locked_by: str | None = None


class WorkerView(Part):
    """An extraction worker as its newest heartbeats tell.

    Attributes:
        shards: shards that it holds now; tokens captured of them so far in `tokens`.
        age_s: seconds since its last sign of life, by the store's clock.
        done: shards that it has committed.
        waiting: what holds it up ("disk", "memory", "uploads"; "leases": others hold all that is left); None: nothing.
        ended: it has finished, or said why it gave up. One that is neither alive nor ended was killed or cut off.
    """

    worker: str
    node: str | None
    shards: tuple[str, ...]
    tokens: int
    age_s: float | None
    done: int
    waiting: str | None = None
    device: str | None = None
    gpus: tuple[GpuView, ...] = ()
    alive: bool = True
    ended: bool = False


class FailureView(Part):
    """A lease that ended without a result: the worker said why, or fell silent."""

    shard: str
    epoch: int
    worker: str
    at: datetime | None
    reason: str


class Series(Part):
    """Points of one quantity. `x`: steps, or seconds since the epoch where `unit_x` is "time"."""

    name: str
    unit: str
    unit_x: Literal["step", "time"]
    x: tuple[float, ...]
    y: tuple[float | None, ...]


class ExtractionView(Part):
    """One run of hidden-state extraction.

    Attributes:
        grid: one character a shard, in the order of their names, shards nobody has begun last: "d" done, "r" done
            after a re-claim, "l" leased, "s" stale (its worker fell silent or gave it up), "." free.
        names: the names of the shards in the grid's order, without those nobody has begun.
        tokens: in committed shards. rate: tokens/s over the last minutes by done-markers; eta_s from it.
        reclaims: leases beyond the first of a shard.
        complete: all shards are done; where nobody says how many there are: all that were begun, and nobody lives.
        damaged: objects that do not hold what was written, each in a sentence, at most 200; nothing else is left out.
    """

    run: str
    store: str
    job: str | None
    known: Known
    shards: int
    done: int
    leased: int
    stale: int
    free: int
    reclaims: int
    tokens: int
    bytes: int
    rate: float | None
    shards_per_min: float | None
    eta_s: float | None
    grid: str
    names: tuple[str, ...] = ()
    workers: tuple[WorkerView, ...] = ()
    failures: tuple[FailureView, ...] = Field((), description="newest first, at most 200")
    failures_total: int = 0
    rates: Series | None = None
    target: str | None = None
    complete: bool = False
    damaged: tuple[str, ...] = ()


class EvaluationView(Part):
    """A measured acceptance on held-out prompts at a step: tokens a pass."""

    step: int
    chain: float | None
    tree: float | None


class TrainingView(Part):
    """One training of a drafter, its newest life.

    Attributes:
        state: "training", "finished", "out of time", "stopped", or "silent" when nothing was heard for long.
        accuracy: by slot 1..B-1, of the last logged step.
        series: loss, learning rate, tokens/s, mean streak, expected streak, noise level, MFU, GPU figures … by step;
            thinned to at most 600 points each, first and last kept.
        damaged: as of an extraction.
    """

    recipe: str
    store: str
    job: str | None
    node: str | None
    epoch: int
    known: Known
    state: str
    step: int
    steps: int | None
    tokens: int
    loss: float | None
    resumed_from: int | None
    age_s: float | None
    eta_s: float | None
    accuracy: tuple[float, ...] = ()
    evaluations: tuple[EvaluationView, ...] = ()
    series: tuple[Series, ...] = ()
    latest: dict[str, float] = Field(default_factory=dict, description="the last row, flat, by name")
    damaged: tuple[str, ...] = ()


class ServerView(Told):
    """A served model by its engine's Prometheus endpoint (SGLang, vLLM). Latencies in seconds over the last minutes."""

    name: str
    url: str
    job: str | None
    engine: str | None
    model: str | None
    known: Known
    up: bool
    tokens_per_s: float | None = None
    requests_per_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    acceptance_length: float | None = None
    running: float | None = None
    waiting: float | None = None
    cache_used: float | None = Field(None, description="share of the KV cache, 0 to 1")
    series: tuple[Series, ...] = ()


class StoreView(Part):
    """An object store: does it answer, how fast is a small request, what lies in it as far as was listed."""

    url: str
    known: Known
    up: bool
    latency_ms: float | None = None
    free_bytes: int | None = Field(None, description="of the disk below a file: store")
    runs: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()


class Snapshot(Part):
    """Everything, as of the newest look of any source (`at`). `sequence` grows with every change but those of the times
    of asking and of a store's latency and free space; a page asks for what is newer."""

    at: datetime
    sequence: int
    fleet: Known
    settled: bool = Field(True, description="every source was asked at least once: what is not here is not there")
    nodes: tuple[NodeView, ...] = ()
    jobs: tuple[JobView, ...] = ()
    extractions: tuple[ExtractionView, ...] = ()
    trainings: tuple[TrainingView, ...] = ()
    servers: tuple[ServerView, ...] = ()
    stores: tuple[StoreView, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For `--json` and /api/snapshot."""
        return self.model_dump(mode="json")
