from __future__ import annotations

from typing import Any

import pytest

from drafthouse.fleet.probe.fit import misfits
from drafthouse.fleet.probe.peers import Reach
from drafthouse.fleet.probe.report import GIB, Clock, Engine, Memory
from tests.unit.fleet.probe.reports import disk, gpu, holder, job, report

PROCESS = {"image": None, "venv": "/opt/venv", "needs": {"python": "3.9", "driver": "580.65", "gpu_memory_gib": 40}}


def sentences(found: Any) -> str:
    return "\n".join(finding.sentence for finding in found)


def test_nothing_speaks_against_a_node_that_has_all() -> None:
    assert misfits(job(), report()) == []
    assert misfits(job(**PROCESS), report(engine=None)) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"engine": None, "reasons": {"engine": "not installed"}},
            "none (not installed) where one",
        ),
        ({"engine": Engine(version="19.3", nvidia=True, root=None, free_bytes=None)}, "19.3 where 20.10 or newer"),
        (
            {"engine": Engine(version="24.0", nvidia=False, root=None, free_bytes=None)},
            "NVIDIA container toolkit: 24.0 without it",
        ),
        ({"driver": "550.9"}, "NVIDIA driver: 550.9 where 580.65 or newer"),
        ({"driver": None, "reasons": {"driver": "no NVIDIA driver is loaded"}}, "unknown (no NVIDIA driver is loaded)"),
        ({"cuda": "12.4"}, "CUDA of the driver: 12.4 where 12.8 or newer"),
        ({"disk": disk("/srv/drafthouse", 99)}, "free disk at /srv/drafthouse: 99.0 GiB where 100 GiB"),
        ({"disk": disk("/srv/drafthouse", 500, writable=False)}, "/srv/drafthouse: not writable"),
        ({"disk": None, "reasons": {"disk": "I/O error"}}, "free disk at the job folder: unknown (I/O error)"),
        ({"shm": disk("/dev/shm", 0.0625)}, "/dev/shm: 0.1 GiB where 16 GiB"),
        (
            {"memory": Memory(total_bytes=128 * GIB, available_bytes=120 * GIB, limit_bytes=32 * GIB)},
            "free memory: 32.0 GiB where 64 GiB",
        ),
        (
            {"gpus": None, "reasons": {"gpus": "it does not answer"}},
            "GPUs: unknown (it does not answer)",
        ),
        ({"gpus": ()}, "GPUs: none where 2"),
        ({"gpus": (gpu(0),)}, "GPUs: 0 NVIDIA RTX A6000 where 2"),
        ({"gpus": (gpu(0), gpu(1, total=24000))}, "memory of GPU 1: 23.4 GiB where 40 GiB"),
        ({"gpus": (gpu(0, holder()), gpu(1))}, "GPU 0: held by python (pid 4711) where a free one"),
        ({"gpus": (gpu(0), gpu(1, holder("b")))}, "GPU 1: held by python (pid 4711 of job b)"),
        ({"gpus": (gpu(0), gpu(1, used=30000))}, "GPU 1: 29.3 GiB in use by processes that cannot be seen"),
        ({"clock": Clock(offset_s=-1000.0, bound_s=0.1)}, "clock: -1000 s off where at most 300 s"),
    ],
)
def test_what_a_node_lacks_is_told(changes: dict[str, Any], sentence: str) -> None:
    found = misfits(job(), report(**changes))
    assert sentence in sentences(found)
    assert all(finding.fix for finding in found)


def test_one_lack_is_told_once() -> None:
    assert len(misfits(job(), report(engine=None))) == 1
    assert len(misfits(job(**PROCESS), report(python="3.8.1"))) == 2, "the supervisor's own need and the job's"


def test_what_the_job_itself_holds_is_free_for_its_next_life() -> None:
    mine = holder("a", 45000)
    assert misfits(job(), report(gpus=(gpu(0, mine, used=45300), gpu(1)))) == []
    hidden = report(gpus=(gpu(0, used=45300), gpu(1)), jobs=("a",))
    assert misfits(job(), hidden) == []
    assert len(misfits(job(), hidden.model_copy(update={"jobs": ("b",)}))) == 1


def test_memory_of_strangers_is_not_the_jobs() -> None:
    found = misfits(job(), report(gpus=(gpu(0, holder("b", 20000)), gpu(1))))
    assert "memory of GPU 0: 28.5 GiB of 48.0 GiB where 40 GiB" in sentences(found)


def test_only_the_gpus_that_it_would_get_are_judged() -> None:
    busy = report(gpus=(gpu(1, holder(memory=None)), gpu(0)))
    assert misfits(job(gpus=1), busy) == []
    assert misfits(job(gpus=["0"]), busy) == []
    assert len(misfits(job(gpus=["GPU-1"]), busy)) == 1
    assert "GPUs: 0 NVIDIA RTX A6000, 1 NVIDIA RTX A6000 where 7" in sentences(misfits(job(gpus=["0", "7"]), busy))
    assert misfits(job(gpus=["MIG-0"]), busy) == [], "in no list of GPUs"
    assert misfits(job(gpus=0), report(gpus=None, driver="580.126.09")) == []


def test_a_container_with_its_own_shared_memory_does_not_need_the_nodes() -> None:
    assert misfits(job(shm_gib=32), report(shm=disk("/dev/shm", 0.0625))) == []


def test_a_clock_matters_to_s3_only_and_only_beyond_what_the_round_trip_explains() -> None:
    off = Clock(offset_s=400.0, bound_s=120.0)
    assert misfits(job(), report(clock=off)) == []
    wrong = report(clock=Clock(offset_s=4000.0, bound_s=1.0))
    assert misfits(job(store="file:///srv/store"), wrong) == []
    assert len(misfits(job(), wrong)) == 1


def test_peers_are_tried_both_ways_or_the_job_does_not_fit() -> None:
    wanting = job(needs={"peers": {"other": 29400, "new": 29400}})
    assert "other:29400: not tried" in sentences(misfits(wanting, report()))
    there, back = Reach("new", "other", 29400, True), Reach("other", "new", 29400, True)
    assert misfits(wanting, report(), [there, back]) == []
    closed = Reach("other", "new", 29400, False, "timed out")
    assert sentences(misfits(wanting, report(), [there, closed])).startswith(
        "other to new:29400: no connection (timed out) where a connection is needed"
    )


@pytest.mark.parametrize(
    ("have", "fits"), [("20.10.24+dfsg1", True), ("20.9", False), ("20.10", True), ("29.0-rc1", True)]
)
def test_versions_are_compared_as_numbers(have: str, fits: bool) -> None:
    found = misfits(job(), report(engine=Engine(version=have, nvidia=True, root=None, free_bytes=None)))
    assert (found == []) == fits
