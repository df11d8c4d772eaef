"""Training: it learns, it counts right, and nothing that ends the process changes its result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import drafthouse
from drafthouse.drafter.anchors import block_tokens, draw_anchors, generator_for
from drafthouse.drafter.checkpoint import WEIGHTS, TrainingState, verify
from drafthouse.drafter.config import DrafterConfig
from drafthouse.drafter.export import load_drafter, read_config
from drafthouse.drafter.losses import LossSettings, block_loss
from drafthouse.drafter.metrics import read_metrics
from drafthouse.drafter.model import DFlashDrafter
from drafthouse.drafter.trainer import Observer, TrainSettings, train
from drafthouse.errors import DrafterError, OutOfMemoryError
from tests.patience import until
from tests.unit.drafter import train_process
from tests.unit.drafter.doubles import Batch, Head, Source, tiny_config

ROOT = Path(__file__).parents[3]


def setup(**changes: object) -> tuple[DrafterConfig, Head, Source]:
    config = tiny_config(**changes)
    head = Head(config.vocab_size, config.hidden_size)
    return config, head, Source(config, head)


def settings(**changes: Any) -> TrainSettings:
    values: dict[str, Any] = {"steps": 6, "rows": 4, "anchors": 6, "log_every": 1, "checkpoint_every": 3}
    return TrainSettings.model_validate(values | changes)


def weights_of(model: DFlashDrafter) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


class OneSample(Source):
    """The same single document for ever."""

    def batches(self, rows: int, seed: int, start_step: int) -> Iterator[Batch]:
        while True:
            yield self.batch(1, 0, 0)


@pytest.mark.parametrize("recipe", ["ce", "kl"])
def test_one_sample_is_learned_in_every_slot(tmp_path: Path, recipe: str) -> None:
    config, head, _ = setup(hidden_size=32)
    source = OneSample(config, head, length=24, prompt=6)
    loss = {"ce": {}, "kl": {"soft_weight": 1.0, "weights": "streak"}}[recipe]
    result = train(
        source,
        head,
        config,
        settings(steps=70, anchors=30, loss=loss, optimizer={"kind": "muon", "lr": 1e-2}, checkpoint_every=500),
        tmp_path,
    )
    batch = source.batch(1, 0, 0)
    length = int(batch.lengths)
    anchors = torch.arange(6, length - 1)[None]
    tokens = block_tokens(batch.input_ids, anchors, config.block_size, config.mask_token_id)
    with torch.no_grad():
        hidden = result.model(batch.hidden_states, head.embed(tokens), anchors, torch.arange(24)[None])
        predicted = head.lm_head(hidden).argmax(-1)[0]
    checked = 0
    for block, anchor in enumerate(anchors[0].tolist()):
        for k in range(1, config.block_size):
            if anchor + k < length:
                assert int(predicted[block, k]) == int(batch.input_ids[0, anchor + k])
                checked += 1
    assert checked > 20
    last = read_metrics(result.metrics)[-1]
    assert last["accuracy"] == [1.0, 1.0, 1.0]
    assert last["mean_streak"] > 2.5


def test_training_generalises_and_reports(tmp_path: Path) -> None:
    config, head, source = setup(hidden_size=32)
    seen: list[int] = []

    def evaluate(model: DFlashDrafter, step: int) -> dict[str, Any]:
        assert not model.training
        assert not torch.is_grad_enabled()
        torch.rand(3)  # a hook's own randomness must not touch the run
        seen.append(step)
        return {"acceptance_length": step / 10}

    result = train(
        source,
        head,
        config,
        settings(
            steps=60,
            rows=8,
            anchors=8,
            log_every=20,
            evaluate_every=25,
            optimizer={"kind": "muon", "lr": 1e-2},
            noise={"kind": "cosine"},
        ),
        tmp_path,
        evaluate=evaluate,
    )
    rows = [row for row in read_metrics(result.metrics) if "evaluation" not in row]
    assert [row["step"] for row in rows] == [1, 20, 40, 60]
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert rows[-1]["expected_streak"] > rows[0]["expected_streak"]
    wanted = {"tokens", "loss_mean", "lr", "noise", "grad_norm", "accuracy", "mean_streak", "tokens_per_s"}
    assert all(wanted <= row.keys() for row in rows)
    assert rows[1]["entropy"] > 0
    assert [row["noise"] for row in rows] == sorted((row["noise"] for row in rows), reverse=True)
    assert rows[-1]["noise"] == 0.0
    assert seen == [25, 50, 60]
    assert result.evaluations == [{"step": s, "acceptance_length": s / 10} for s in seen]
    assert (result.steps, result.stopped, result.resumed_from) == (60, "finished", None)
    total = sum(int(source.batch(8, 0, n).lengths.sum()) for n in range(60))
    assert result.tokens == rows[-1]["tokens"] == total
    assert result.drafter is not None
    exported = load_drafter(result.drafter, num_layers=4)
    for name, tensor in result.model.state_dict().items():
        assert torch.equal(tensor.bfloat16().float(), exported.state_dict()[name])
    trained = read_config(result.drafter)["drafthouse"]["trained"]
    assert trained["steps"] == 60
    assert trained["tokens"] == total


def test_accumulation_is_the_sum_over_micro_batches(tmp_path: Path) -> None:
    """Two micro-batches of unequal weight: the step is the gradient of sum w l / sum w over both."""
    config, head, source = setup()
    hard = LossSettings(soft_weight=0.0, weights="decay")
    optimizer = {"lr": 1e-3, "clip": 1e9, "weight_decay": 0.0}
    chosen = settings(steps=1, rows=2, accumulate=2, optimizer=optimizer, loss=hard.model_dump())
    result = train(source, head, config, chosen, tmp_path)
    model = DFlashDrafter(config)
    model.reset_parameters(chosen.seed)
    numerator, weight = torch.zeros(()), torch.zeros(())
    for number in range(2):
        batch = source.batch(2, chosen.seed, number)
        anchors = draw_anchors(batch.loss_mask, 6, generator_for(chosen.seed, number, "anchors"))
        tokens = block_tokens(batch.input_ids, anchors, config.block_size, config.mask_token_id)
        positions = torch.arange(24).expand(2, 24).masked_fill(torch.arange(24) >= batch.lengths[:, None], -1)
        hidden = model(batch.hidden_states, head.embed(tokens), anchors, positions)
        loss = block_loss(hidden, anchors, batch.input_ids, batch.loss_mask, head.lm_head, hard)
        numerator, weight = numerator + loss.numerator, weight + loss.weight
    (numerator / weight).backward()
    torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0).step()
    row = read_metrics(result.metrics)[0]
    assert row["loss"] == pytest.approx(float((numerator / weight).detach()), rel=1e-5)
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert row["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    for name, tensor in result.model.state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=0, atol=2e-5)


def test_same_seed_same_weights_other_seed_other_weights(tmp_path: Path) -> None:
    config, head, source = setup()
    runs = [
        weights_of(train(source, head, config, settings(seed=seed), tmp_path / name).model)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert same(runs[0], runs[1])
    assert not same(runs[0], runs[2])


def test_attention_forms_and_autocast_train_alike(tmp_path: Path) -> None:
    config, head, source = setup()
    losses = {}
    for name, changes in (("split", {}), ("dense", {"attention": "dense"}), ("bf16", {"autocast": "bf16"})):
        losses[name] = train(source, head, config, settings(**changes), tmp_path / name).loss
    assert losses["dense"] == pytest.approx(losses["split"], rel=1e-4)
    assert losses["bf16"] == pytest.approx(losses["split"], rel=0.02)


def test_asked_to_stop_then_resumed_equals_undisturbed(tmp_path: Path) -> None:
    config, head, source = setup()
    whole = train(source, head, config, settings(), tmp_path / "whole")
    calls = iter([False, False, False, True])
    first = train(source, head, config, settings(), tmp_path / "cut", stop=lambda: next(calls))
    assert (first.steps, first.stopped, first.drafter) == (4, "asked", None)
    second = train(source, head, config, settings(log_every=2), tmp_path / "cut")
    assert (second.steps, second.stopped, second.resumed_from) == (6, "finished", 4)
    assert same(weights_of(whole.model), weights_of(second.model))
    assert second.loss == whole.loss
    assert second.tokens == whole.tokens
    # A finished run that is started again only exports again.
    third = train(source, head, config, settings(), tmp_path / "cut")
    assert (third.resumed_from, third.steps) == (6, 6)
    assert same(weights_of(whole.model), weights_of(third.model))


class Told(Observer):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.began_at: tuple[int, int | None] | None = None
        self.steps: list[int] = []
        self.saves: list[str] = []

    def began(self, state: TrainingState, resumed_from: int | None) -> None:
        self.began_at = (state.step, resumed_from)

    def stepped(self, row: Mapping[str, Any]) -> None:
        assert {"tokens", "loss", "loss_mean"} <= row.keys()
        self.steps.append(row["step"])

    def saved(self, checkpoint: Path) -> None:
        assert verify(checkpoint) is None
        self.saves.append(checkpoint.name)


def test_an_observer_is_told_every_step_and_checkpoint(tmp_path: Path) -> None:
    config, head, source = setup()
    first, second = Told(), Told()
    calls = iter([False, False, False, True])
    train(source, head, config, settings(), tmp_path, stop=lambda: next(calls), observer=first)
    assert (first.began_at, first.steps) == ((0, None), [1, 2, 3, 4])
    assert first.saves == ["step-00000003", "step-00000004"]
    train(source, head, config, settings(), tmp_path, observer=second)
    assert (second.began_at, second.steps, second.saves) == ((4, 4), [5, 6], ["step-00000006"])


def test_what_stop_raises_ends_the_run_as_it_stands(tmp_path: Path) -> None:
    config, head, source = setup()

    def stop() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(source, head, config, settings(), tmp_path, stop=stop)
    assert not (tmp_path / "checkpoints").exists()


def test_an_evaluation_that_was_missed_is_made_up(tmp_path: Path) -> None:
    """Ended between the last checkpoint and the last evaluation: the next start evaluates, and only once."""
    config, head, source = setup()

    def broken(model: DFlashDrafter, step: int) -> dict[str, Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(source, head, config, settings(), tmp_path, evaluate=broken)
    for _ in range(2):
        result = train(source, head, config, settings(), tmp_path, evaluate=lambda model, step: {"x": float("nan")})
        assert result.resumed_from == 6
        assert result.evaluations == [{"step": 6, "x": None}]


def test_time_budget_stops_and_exports(tmp_path: Path) -> None:
    config, head, source = setup()
    source.pause = 0.02
    result = train(source, head, config, settings(steps=1000, max_seconds=0.3), tmp_path)
    assert result.stopped == "time"
    assert 0 < result.steps < 100
    assert result.drafter is not None
    assert read_config(result.drafter)["drafthouse"]["trained"]["of_steps"] == 1000


def _start(out: Path, *held: object) -> subprocess.Popen[bytes]:
    source = str(Path(drafthouse.__file__).parents[1])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{source}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.unit.drafter.train_process", str(out), *map(str, held)]
    return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE)


def test_killed_and_resumed_equals_undisturbed_to_the_bit(tmp_path: Path) -> None:
    batch = 13 * train_process.SETTINGS.accumulate  # that of step 14: it stands still there
    killed = _start(tmp_path / "killed", batch, tmp_path / "never")
    log = tmp_path / "killed" / "metrics.jsonl"
    until(
        lambda: len(log.read_text().splitlines()) >= 12,
        "the curve",
        unless=lambda: killed.poll() is not None and f"it has ended with {killed.returncode}",
    )
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert not (tmp_path / "killed" / "drafter").exists()
    before = len(log.read_text().splitlines())

    resumed = _start(tmp_path / "killed")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the other processes: sums are taken in an order that depends on it
    try:
        expected = train_process.main(tmp_path / "whole")
    finally:
        torch.set_num_threads(threads)
    report = json.loads(resumed.communicate(timeout=240)[0])
    assert resumed.returncode == 0
    assert report["resumed_from"] in (10, 15, 20)
    assert before < train_process.SETTINGS.steps
    assert expected["resumed_from"] is None
    assert report["loss"] == expected["loss"]

    steps = train_process.SETTINGS.steps
    last = f"checkpoints/step-{steps:08d}"
    a = load_file(tmp_path / "whole" / last / WEIGHTS)
    b = load_file(tmp_path / "killed" / last / WEIGHTS)
    assert same(a, b)
    for file in ("drafter/model.safetensors", "drafter/config.json", f"{last}/training.safetensors"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "killed" / file).read_bytes()
    rows = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "killed")]
    assert [row["step"] for row in rows[1]] == list(range(1, steps + 1))
    clock = {"seconds", "tokens_per_s"}
    for one, other in zip(*rows, strict=True):
        assert {k: v for k, v in one.items() if k not in clock} == {k: v for k, v in other.items() if k not in clock}


def test_resuming_under_other_settings_is_refused(tmp_path: Path) -> None:
    config, head, source = setup()
    train(source, head, config, settings(), tmp_path)
    before = sorted(tmp_path.rglob("*"))
    changed = settings(optimizer={"lr": 1e-5}, loss={"soft_weight": 0.5})
    with pytest.raises(DrafterError, match=r"train.loss.soft_weight: 1.0 → 0.5; train.optimizer.lr: 0.0006 → 1e-05"):
        train(source, head, config, changed, tmp_path)
    with pytest.raises(DrafterError, match=r"drafter.rope_theta: 10000000.0 → 5.0"):
        train(source, head, tiny_config(rope_theta=5.0), settings(), tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_identity": "b"}, "target a, the drafter wants b"),
        ({"target_layer_ids": (0, 3)}, r"layer_ids \[0, 2\], the drafter wants \[0, 3\]"),
        ({"hidden_size": 32}, "hidden_size 16, the drafter wants 32"),
    ],
)
def test_states_of_another_drafter_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    _, head, source = setup(target_identity="a")
    with pytest.raises(DrafterError, match=f"the hidden states have {words}"):
        train(source, head, tiny_config(**({"target_identity": "a"} | changes)), settings(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_batch_that_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    config, head, source = setup()
    with pytest.raises(OutOfMemoryError, match=r"4 rows of 10000000000000 anchors do not fit.*lower train.rows"):
        train(source, head, config, settings(anchors=10**13), tmp_path)


def test_a_broken_loss_stops_before_the_checkpoint(tmp_path: Path) -> None:
    config, head, _ = setup()

    class Broken(Source):
        def batch(self, rows: int, seed: int, number: int) -> Batch:
            batch = super().batch(rows, seed, number)
            if number == 4:
                batch.hidden_states[0, 0] = float("nan")
            return batch

    with pytest.raises(DrafterError, match="no longer a number at step 5"):
        train(Broken(config, head), head, config, settings(checkpoint_every=1), tmp_path)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir())[-1] == "step-00000004"


def test_a_batch_without_a_supervised_token_changes_nothing(tmp_path: Path) -> None:
    config, head, _ = setup()

    class Unsupervised(Source):
        def batch(self, rows: int, seed: int, number: int) -> Batch:
            batch = super().batch(rows, seed, number)
            batch.loss_mask.zero_()
            return batch

    result = train(Unsupervised(config, head), head, config, settings(), tmp_path)
    fresh = DFlashDrafter(config)
    assert same(weights_of(result.model), weights_of(fresh))
    assert result.steps == 6
