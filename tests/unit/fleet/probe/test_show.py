from __future__ import annotations

from rich.console import Console

from drafthouse.fleet.errors import UnreachableError
from drafthouse.fleet.probe.report import Clock
from drafthouse.fleet.probe.show import table
from tests.unit.fleet.probe.reports import gpu, holder, report


def shown(*arguments: object) -> str:
    console = Console(width=250, record=True, highlight=False)
    with console.capture() as captured:
        console.print(table(*arguments))  # type: ignore[arg-type]
    return captured.get()


def test_a_node_is_one_row_with_all_its_gpus() -> None:
    text = shown({"new": report(gpus=(gpu(0), gpu(1, holder("train-qwen"), used=30000)))})
    for part in (
        "0 NVIDIA RTX A6000 0/48 GiB, 31°C, 22 W, 0 %",
        "1 NVIDIA RTX A6000 29/48 GiB, 31°C, 22 W, 0 %, train-qwen",
        "all pairs NV4",
        "580.126.09 / 13.0",
        "120.0 GiB",
        "docker 24.0.5, systemd",
        "+0.01 ± 0.02 s",
    ):
        assert part in text


def test_what_is_not_known_is_a_dash_with_its_reason_below() -> None:
    unknown = dict.fromkeys(("gpus", "driver", "cuda", "engine", "clock", "memory", "disk", "shm", "cpu"))
    bare = report(**unknown, paths={}, systemd=False, reasons={"gpus": "nvidia-smi [broken] is not installed"})
    text = shown({"new": bare})
    assert "none" in text
    assert "processes, no systemd" in text
    assert "new: gpus: nvidia-smi [broken] is not installed" in text
    assert text.count("–") >= 6


def test_nodes_without_an_answer_and_misfits_stand_below() -> None:
    text = shown(
        {"gone": UnreachableError("no answer", where="gone"), "new": report(clock=Clock(offset_s=9.0, bound_s=0.1))},
        {"new": ["free disk: 1 GiB where 2 GiB is needed"]},
    )
    assert "no answer" in text
    assert "new: free disk: 1 GiB where 2 GiB is needed" in text
    assert "the job would fit" in shown({"new": report()}, {"new": []})
