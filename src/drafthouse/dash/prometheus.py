"""`/metrics`: the snapshot in the text format of Prometheus.

Names follow https://prometheus.io/docs/practices/naming/: base units, `_total` for counters. What nobody could tell has
no sample, so that a dashboard shows a gap and not a zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from drafthouse.dash.model import Known, Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MIB = 2**20
_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})


class Metric(NamedTuple):
    """One metric of a group: its name behind the group's, and how its value is found; None: no sample."""

    name: str
    text: str
    value: Callable[[Any], Any]
    kind: str = "gauge"


class Group(NamedTuple):
    """Metrics of things of one kind: `things` are the values of `labels` with what these tell."""

    prefix: str
    labels: tuple[str, ...]
    things: Sequence[tuple[tuple[str, ...], Any]]
    metrics: tuple[Metric, ...]


def exposition(snapshot: Snapshot) -> bytes:
    """The snapshot as a page for Prometheus to read, with HELP and TYPE of every metric.

    Written out here: things of a group share their labels over all its metrics, and of 200 nodes with 8 GPUs each the
    client library, which escapes and checks every label of every sample, makes a page in four times as long.
    https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
    """
    lines = []
    for group in _groups(snapshot):
        things = [(_labels(group.labels, values), thing) for values, thing in group.things]
        for metric in group.metrics:
            name = f"drafthouse_{group.prefix}{metric.name}"
            lines += [f"# HELP {name} {metric.text}", f"# TYPE {name} {metric.kind}"]
            for labels, thing in things:
                value = metric.value(thing)
                if value is not None:
                    lines.append(f"{name}{labels} {float(value)!r}")
    return ("\n".join(lines) + "\n").encode()


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    """`{name="value",…}`; nothing without labels."""
    pairs = [f'{name}="{value.translate(_ESCAPES)}"' for name, value in sorted(zip(names, values, strict=True))]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _groups(snapshot: Snapshot) -> Iterator[Group]:
    yield Group("", (), [((), snapshot)], _PAGE)
    yield Group("source_", ("kind", "source"), _sources(snapshot), _SOURCE)
    yield Group("node_", ("node",), [((node.name,), node) for node in snapshot.nodes], _NODE)
    gpus = [
        ((node.name, str(gpu.index), gpu.uuid or "", gpu.name), gpu) for node in snapshot.nodes for gpu in node.gpus
    ]
    yield Group("gpu_", ("node", "gpu", "uuid", "model"), gpus, _GPU)
    yield Group("job_", ("job", "kind"), [((job.name, job.kind), job) for job in snapshot.jobs], _JOB)
    runs = [((run.run, run.store), run) for run in snapshot.extractions]
    yield Group("extraction_", ("run", "store"), runs, _EXTRACTION)
    counts = [
        ((*labels, state), getattr(run, state)) for labels, run in runs for state in ("done", "leased", "stale", "free")
    ]
    shards = Metric("shards", "Shards of the run, by where they stand.", lambda count: count)
    yield Group("extraction_", ("run", "store", "state"), counts, (shards,))
    workers = [
        ((run.run, run.store, worker.worker, worker.node or ""), worker)
        for run in snapshot.extractions
        for worker in run.workers
    ]
    yield Group("worker_", ("run", "store", "worker", "node"), workers, _WORKER)
    trainings = [((one.recipe, one.store), one) for one in snapshot.trainings]
    yield Group("training_", ("recipe", "store"), trainings, _TRAINING)
    slots = [((*labels, str(slot)), value) for labels, one in trainings for slot, value in enumerate(one.accuracy, 1)]
    accuracy = Metric("accuracy_ratio", "Share of right drafts, by slot of the block.", lambda value: value)
    yield Group("training_", ("recipe", "store", "slot"), slots, (accuracy,))
    servers = [((one.name, one.engine or "", one.model or ""), one) for one in snapshot.servers]
    yield Group("server_", ("server", "engine", "model"), servers, _SERVER)
    yield Group("store_", ("store",), [((store.url,), store) for store in snapshot.stores], _STORE)


def _sources(snapshot: Snapshot) -> list[tuple[tuple[str, ...], Any]]:
    known = [
        ("fleet", "inventory", snapshot.fleet),
        *(("run", f"{one.store}/{one.run}", one.known) for one in snapshot.extractions),
        *(("training", f"{one.store}/{one.recipe}", one.known) for one in snapshot.trainings),
        *(("server", one.name, one.known) for one in snapshot.servers),
        *(("store", one.url, one.known) for one in snapshot.stores),
    ]
    return [((kind, name), one) for kind, name, one in known if one != Known()]


def _seconds(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()


def _share(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def _bytes(mib: float | None) -> float | None:
    return None if mib is None else mib * _MIB


_PAGE = (Metric("snapshot_timestamp_seconds", "When the page last looked at anything.", lambda all: _seconds(all.at)),)
_SOURCE = (
    Metric("up", "1 when the source answered at its last look.", lambda known: known.error is None),
    Metric(
        "answered_timestamp_seconds",
        "When the source last answered; what is shown of it is as of then.",
        lambda known: _seconds(known.answered),
    ),
)
_NODE = (
    Metric("up", "1 when the node answers, or a worker on it was heard of.", lambda node: node.state == "answers"),
    Metric("last_seen_timestamp_seconds", "When it was last heard of.", lambda node: _seconds(node.last_seen)),
    Metric("load1", "Load average over one minute.", lambda node: node.load_1min),
    Metric("cpus", "CPU cores that jobs may use.", lambda node: node.cores),
    Metric("memory_bytes", "Main memory.", lambda node: node.memory_bytes),
    Metric("memory_available_bytes", "Main memory that jobs may hope for.", lambda node: node.memory_free_bytes),
    Metric("filesystem_size_bytes", "Size of the disk of the job folders.", lambda node: node.disk_bytes),
    Metric("filesystem_available_bytes", "Free space on that disk.", lambda node: node.disk_free_bytes),
)
_GPU = (
    Metric("utilization_ratio", "Share of time in which a kernel ran.", lambda gpu: _share(gpu.utilization_percent)),
    Metric("memory_bytes", "Memory of the GPU.", lambda gpu: _bytes(gpu.memory_mib)),
    Metric("memory_used_bytes", "Memory in use.", lambda gpu: _bytes(gpu.used_mib)),
    Metric("temperature_celsius", "Temperature of the chip.", lambda gpu: gpu.temperature_c),
    Metric("power_watts", "Power draw of the board.", lambda gpu: gpu.power_w),
    Metric("power_limit_watts", "Power limit of the board.", lambda gpu: gpu.power_limit_w),
)
_JOB = (
    Metric("live", "1 when the life that counts has shown that it works.", lambda job: job.status == "live"),
    Metric("epoch", "Number of the life that counts.", lambda job: job.epoch),
    Metric("locked", "1 while an operator holds the job's lock.", lambda job: job.locked_by is not None),
)
_EXTRACTION = (
    Metric("tokens_total", "Tokens in finished shards.", lambda run: run.tokens, "counter"),
    Metric("bytes_total", "Bytes of finished shards.", lambda run: run.bytes, "counter"),
    Metric("reclaims_total", "Leases beyond the first of a shard.", lambda run: run.reclaims, "counter"),
    Metric("failures_total", "Leases that ended without a result.", lambda run: run.failures_total, "counter"),
    Metric("tokens_per_second", "Tokens a second over the last minutes, by finished shards.", lambda run: run.rate),
    Metric("eta_seconds", "Time until all shards are done at that pace.", lambda run: run.eta_s),
    Metric("complete", "1 when all shards are done.", lambda run: run.complete),
    Metric("damaged_objects", "Objects that do not hold what was written.", lambda run: len(run.damaged)),
)
_WORKER = (
    Metric("up", "1 when the worker shows that it lives.", lambda worker: worker.alive),
    Metric("age_seconds", "Time since its last sign of life.", lambda worker: worker.age_s),
    Metric("shards_total", "Shards that it has finished.", lambda worker: worker.done, "counter"),
    Metric("waiting", "1 while something holds it up.", lambda worker: worker.waiting is not None),
)
_TRAINING = (
    Metric("step", "Steps that are done.", lambda one: one.step),
    Metric("steps", "Steps of the whole run.", lambda one: one.steps),
    Metric("tokens_total", "Tokens that were trained on.", lambda one: one.tokens, "counter"),
    Metric("loss", "Loss of the last step that was told (nats).", lambda one: one.loss),
    Metric("learning_rate", "Learning rate.", lambda one: one.latest.get("lr")),
    Metric("noise", "Level of the noise on hidden states.", lambda one: one.latest.get("noise")),
    Metric("streak_tokens", "Mean accepted run of a block.", lambda one: one.latest.get("mean_streak")),
    Metric("tokens_per_second", "Tokens a second.", lambda one: one.latest.get("tokens_per_s")),
    Metric(
        "acceptance_length_tokens",
        "Tokens a pass on held-out prompts, by the last evaluation.",
        lambda one: (one.evaluations[-1].tree or one.evaluations[-1].chain) if one.evaluations else None,
    ),
    Metric("age_seconds", "Time since it was last heard of.", lambda one: one.age_s),
    Metric("eta_seconds", "Time until its end at the present pace.", lambda one: one.eta_s),
    Metric("running", "1 while it trains, as far as is known.", lambda one: one.state == "training"),
)
_SERVER = (
    Metric("up", "1 when the server shows its metrics.", lambda one: one.up),
    Metric("tokens_per_second", "Generated tokens a second.", lambda one: one.tokens_per_s),
    Metric("requests_per_second", "Finished requests a second.", lambda one: one.requests_per_s),
    Metric("time_to_first_token_p50_seconds", "Median over the last minutes.", lambda one: one.ttft_p50_s),
    Metric("time_to_first_token_p95_seconds", "95th percentile over the last minutes.", lambda one: one.ttft_p95_s),
    Metric("acceptance_length_tokens", "Tokens a verify pass.", lambda one: one.acceptance_length),
    Metric("requests_running", "Requests that are being answered.", lambda one: one.running),
    Metric("requests_waiting", "Requests in the queue.", lambda one: one.waiting),
    Metric("cache_used_ratio", "Share of the KV cache in use.", lambda one: one.cache_used),
)
_STORE = (
    Metric("up", "1 when the store answers.", lambda store: store.up),
    Metric(
        "latency_seconds", "Time of a small request.", lambda s: None if s.latency_ms is None else s.latency_ms / 1000
    ),
    Metric("free_bytes", "Free space of the disk below a file: store.", lambda store: store.free_bytes),
)
