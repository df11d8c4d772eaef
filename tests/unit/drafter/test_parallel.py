"""Two processes over gloo take the steps of one process with twice the rows, replicated and sharded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafthouse.drafter.metrics import read_metrics
from drafthouse.drafter.parallel import Ranks
from drafthouse.drafter.trainer import TrainSettings, _check_parallel, train
from drafthouse.errors import DrafterError
from tests.ports import free_port
from tests.unit.drafter.doubles import Batch, Head, Source, tiny_config

ROOT = Path(__file__).parents[3]


class Shared(Source):
    """Rank r of n reads the r-th part of the rows that a single process would read."""

    def batches(self, rows: int, seed: int, start_step: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        for number in range(start_step, 10**6):
            whole = self.batch(rows * ranks, seed, number)
            part = slice(rank * rows, (rank + 1) * rows)
            yield Batch(**{name: value[part] for name, value in vars(whole).items()})


def run(out: Path, rows: int, parallel: str, stop_at: int = 10**6) -> Any:
    config = tiny_config()
    head = Head(config.vocab_size, config.hidden_size)
    settings = TrainSettings.model_validate(
        {
            "steps": 4,
            "rows": rows,
            "anchors": 24,  # all that there are: what is drawn does not depend on the rank
            "accumulate": 2,
            "log_every": 1,
            "parallel": parallel,
            "optimizer": {"lr": 3e-3},
            "loss": {"weights": "streak", "soft_weight": 0.5},
            "export_dtype": "float32",
        }
    )
    steps = iter(range(1, 10**6))
    return train(Shared(config, head), head, config, settings, out, stop=lambda: next(steps) >= stop_at)


def launch(out: Path, parallel: str, *, stop_at: int = 10**6) -> None:
    """This file as two processes, under the environment that torchrun sets."""
    environment = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
    }
    command = [sys.executable, "-m", "tests.unit.drafter.test_parallel", str(out), parallel, str(stop_at)]
    children = [
        subprocess.Popen(
            command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [child.communicate(timeout=240)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0], "\n".join(outputs)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_take_the_steps_of_one(tmp_path: Path, parallel: str) -> None:
    alone = run(tmp_path / "alone", 4, "ddp")
    launch(tmp_path / "two", parallel, stop_at=2)  # stopped on the way: the checkpoint must hold whole tensors
    launch(tmp_path / "two", parallel)
    expected, found = (load_file(tmp_path / name / "drafter" / "model.safetensors") for name in ("alone", "two"))
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5)
    rows = read_metrics(tmp_path / "two" / "metrics.jsonl")
    reference = read_metrics(alone.metrics)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for key in ("loss", "tokens", "blocks", "grad_norm", "flops"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in reference], rel=1e-4)


def test_muon_is_refused_where_matrices_are_sharded() -> None:
    settings = TrainSettings.model_validate({"parallel": "fsdp", "optimizer": {"kind": "muon"}})
    with pytest.raises(DrafterError, match="muon orthogonalises whole matrices"):
        _check_parallel(settings, Ranks(0, 2))
    _check_parallel(settings, Ranks())


if __name__ == "__main__":
    torch.set_num_threads(1)
    finished = run(Path(sys.argv[1]), 2, sys.argv[2], int(sys.argv[3]))
    print(json.dumps({"steps": finished.steps, "stopped": finished.stopped}))
