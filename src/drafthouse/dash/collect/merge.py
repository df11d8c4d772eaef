"""Nodes: what probes say of them, and what the workers on them and this machine itself say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from drafthouse.dash.model import ExtractionView, GpuView, JobView, NodeView

FRESH_S = 120.0
"""A node whose worker has spoken within this time answers, whatever ssh says."""


def merged(
    probed: Mapping[str, NodeView],
    extractions: Iterable[ExtractionView],
    jobs: Iterable[JobView],
    here: NodeView | None,
    now: datetime,
) -> tuple[NodeView, ...]:
    """All nodes by name: those of the inventory, those that workers name, and this machine if it has GPUs.

    Args:
        probed: nodes of the inventory by name, as they were last asked.
        now: by this machine's clock.
    """
    found = dict(probed)
    for name, (seen, gpus, names, awaited) in _heard(extractions).items():
        node = found.get(name) or NodeView(name=name, state="unknown", last_seen=None)
        found[name] = _told(node, seen, gpus, names, now, awaited=awaited)
    if here is not None:
        known = found.get(here.name)
        found[here.name] = here if known is None else _told(known, here.last_seen, here.gpus, (), now, awaited=True)
    for job in jobs:
        if job.node in found and job.name not in found[job.node].jobs:
            node = found[job.node]
            found[job.node] = node.model_copy(update={"jobs": tuple(sorted({*node.jobs, job.name}))})
    return tuple(found[name] for name in sorted(found))


def _heard(
    extractions: Iterable[ExtractionView],
) -> dict[str, tuple[datetime | None, tuple[GpuView, ...], tuple[str, ...], bool]]:
    """Node -> when a worker on it was last heard of, its GPUs, the jobs that these workers are of, and whether any of
    them should be heard: neither it nor its run has come to an end."""
    found: dict[str, tuple[datetime | None, tuple[GpuView, ...], tuple[str, ...], bool]] = {}
    for run in extractions:
        for worker in run.workers:
            if worker.node is None:
                continue
            seen, gpus, jobs, awaited = found.get(worker.node, (None, (), (), False))
            answered = run.known.answered
            if worker.age_s is not None and answered is not None:
                sign = answered - timedelta(seconds=worker.age_s)
                seen = sign if seen is None else max(seen, sign)
            if worker.alive and run.job is not None and run.job not in jobs:
                jobs = (*jobs, run.job)
            found[worker.node] = (seen, (*gpus, *worker.gpus), jobs, awaited or not (run.complete or worker.ended))
    return found


def _told(
    node: NodeView,
    seen: datetime | None,
    gpus: Sequence[GpuView],
    jobs: Sequence[str],
    now: datetime,
    *,
    awaited: bool,
) -> NodeView:
    """`node`, of which somebody on it was heard at `seen`; whose silence means something if it is `awaited`."""
    last = max((at for at in (node.last_seen, seen) if at is not None), default=None)
    fresh = seen is not None and now - seen <= timedelta(seconds=FRESH_S)
    state = node.state
    if fresh:
        state = "answers"
    elif state == "unknown" and seen is not None:
        state = "silent" if awaited else "finished"
    newest: dict[str, GpuView] = {}
    for gpu in (*node.gpus, *gpus):
        name = gpu.uuid or str(gpu.index)
        known = newest.get(name)
        if known is None or (gpu.at is not None and (known.at is None or gpu.at > known.at)):
            newest[name] = gpu if known is None or gpu.job else gpu.model_copy(update={"job": known.job})
    return node.model_copy(
        update={
            "state": state,
            "last_seen": last,
            "gpus": tuple(sorted(newest.values(), key=lambda gpu: gpu.index)),
            "jobs": tuple(sorted({*node.jobs, *jobs})),
        }
    )
