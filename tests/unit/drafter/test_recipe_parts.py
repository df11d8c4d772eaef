"""Packing, counted work, the gauge and the sinks: the parts around a training step."""

from __future__ import annotations

import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from drafthouse.drafter.gauge import Gauge
from drafthouse.drafter.metrics import SlotSums, read_metrics
from drafthouse.drafter.packing import BLOCK_STEP, CONTEXT_STEP, pack
from drafthouse.drafter.sinks import Sinks, flat
from drafthouse.drafter.trainer import TrainSettings, train
from drafthouse.drafter.work import Work, peak_of
from tests.unit.drafter.doubles import Head, Source, tiny_config


def trained(tmp_path: Path, name: str, **changes: Any) -> Any:
    config = tiny_config(layer_types=("sliding_attention", "full_attention"), sliding_window=7)
    head = Head(config.vocab_size, config.hidden_size)
    values = {"steps": 4, "rows": 3, "anchors": 6, "log_every": 1, "loss": {"soft_weight": 0.5}} | changes
    return train(Source(config, head), head, config, TrainSettings.model_validate(values), tmp_path / name)


def test_packed_rows_train_as_padded_ones(tmp_path: Path) -> None:
    padded, packed = (trained(tmp_path, str(packing), packing=packing) for packing in (False, True))
    losses = [[row["loss"] for row in read_metrics(one.metrics)] for one in (padded, packed)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for one, other in zip(padded.model.parameters(), packed.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_a_pack_keeps_what_blocks_see_and_nothing_else() -> None:
    taps = torch.arange(2 * 9.0).view(2, 9, 1, 1)
    anchors = torch.tensor([[2, 5, -1], [-1, -1, -1]])
    tokens = torch.arange(12).view(2, 3, 2)
    packed = pack(taps, torch.tensor([9, 4]), anchors, tokens)
    assert packed.taps.shape[1] % CONTEXT_STEP == 0
    assert packed.anchors.shape[1] % BLOCK_STEP == 0
    assert packed.taps[0, :5].flatten().tolist() == [0, 1, 2, 3, 4]
    assert packed.positions[0, :6].tolist() == [0, 1, 2, 3, 4, -1]
    assert packed.anchors[0, :3].tolist() == [2, 5, -1]
    assert packed.tokens[0, :2].tolist() == [[0, 1], [2, 3]]
    hidden = torch.ones(1, packed.anchors.shape[1], 2, 4)
    restored = packed.restore(hidden, 2, 3)
    assert restored.sum((-1, -2)).tolist() == [[8.0, 8.0, 0.0], [0.0, 0.0, 0.0]]


def test_work_by_hand() -> None:
    config = tiny_config(layer_types=("sliding_attention", "full_attention"), sliding_window=3)
    lengths, anchors = torch.tensor([10]), torch.tensor([[4, 6, -1]])
    work = Work.of(lengths, anchors, config, teacher=True)
    # Blocks at 4 and 6 (B = 4) are taught by 4, 5 | 6, 7, 8.
    assert work.counts.tolist() == [10, 2, 10, 6, 5]
    h, q, kv, f, v = 16, 32, 16, 24, 20
    expected = 10 * (4 * 2 * h * h + 12 * 2 * h * kv)
    expected += 2 * 4 * 6 * 2 * (2 * h * q + 2 * h * kv + 3 * h * f)
    expected += 12 * q * (4 * 10 + 2 * 16) + 12 * q * (4 * 6 + 2 * 10)
    expected += v * h * (4 * 6 + 2 * 5)
    assert work.flops(config, labels=6) == expected
    assert (work + work).counts.tolist() == [20, 4, 20, 12, 10]
    assert Work.of(lengths, anchors, config, teacher=False).counts[-1] == 0
    assert peak_of(torch.device("cpu")) is None


def test_sums_survive_the_vector() -> None:
    sums = SlotSums.zeros(3)
    for number, name in enumerate(vars(sums)):
        getattr(sums, name).fill_(number + 1)
    again = SlotSums.from_flat(sums.flat(), 3)
    assert all(torch.equal(getattr(again, name), value) for name, value in vars(sums).items())


def test_a_gauge_without_a_device_says_nothing() -> None:
    assert Gauge(torch.device("cpu")).read() == {}


def test_rows_are_flattened_to_numbers() -> None:
    row = {"step": 1, "accuracy": [0.5, 0.25], "evaluation": {"chain": 2.0, "text": "no"}, "done": True, "lost": None}
    assert flat(row) == {"step": 1.0, "accuracy/0": 0.5, "accuracy/1": 0.25, "evaluation/chain": 2.0}


class Tracker(types.ModuleType):
    """A tracker that breaks when it is told of step 3."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.seen: list[int] = []
        self.finished = False

    def init(self, **arguments: Any) -> None:
        assert arguments["project"] == "drafthouse"

    def log(self, values: dict[str, float], step: int) -> None:
        if step == 3:
            raise ConnectionError("the server is gone")
        self.seen.append(step)

    def finish(self) -> None:
        self.finished = True


def test_a_sink_that_fails_is_named_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker()
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with caplog.at_level(logging.WARNING):
        result = trained(tmp_path, "sinks", sinks=["trackio", "wandb"])
    assert result.stopped == "finished"
    assert len(read_metrics(result.metrics)) == 4
    assert tracker.seen == [1, 2]
    assert not tracker.finished, "it was left alone after it failed"
    warnings = [record.getMessage() for record in caplog.records if "metrics do not go to" in record.getMessage()]
    assert len(warnings) == 2
    assert any("trackio: the server is gone" in text for text in warnings)
    assert any("wandb" in text for text in warnings)


def test_a_whole_sink_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker()
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    sinks = Sinks(["trackio"], project="drafthouse", run="r", folder=tmp_path, settings={})
    sinks.write(1, {"loss": 2.0})
    sinks.close()
    assert tracker.seen == [1]
    assert tracker.finished
