"""Training the small target: its schedule, batches and loss, and a short run that must come out the same."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from drafthouse.config import validate
from drafthouse.errors import ConfigError, OutOfMemoryError, TargetError
from drafthouse.target import Target, tiny
from drafthouse.target.tiny import (
    TinyShape,
    TinyTraining,
    batches,
    collate,
    initialise,
    learning_rate,
    train_tiny,
    weighted_loss,
)
from tests.unit.target import short_run

SMALL = TinyShape(hidden_size=16, intermediate_size=16, head_dim=8, linear_head_dim=8)


@dataclass(frozen=True)
class Text:
    """A training text whose first token names it."""

    input_ids: np.ndarray
    loss_mask: np.ndarray

    @classmethod
    def of(cls, number: int, length: int) -> Text:
        ids = np.full(length, 7, dtype=np.int32)
        ids[0] = 10 + number
        mask = np.zeros(length, dtype=np.uint8)
        mask[length // 2 :] = 1
        return cls(ids, mask)


def texts(count: int) -> list[Text]:
    lengths = np.random.default_rng(0).integers(4, 150, count)
    return [Text.of(number, int(length)) for number, length in enumerate(lengths)]


def names(ids: Tensor) -> list[int]:
    return [int(token) - 10 for token in ids[:, 0]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The short run: its report, its folder, and logits of the model that `finish` was shown."""
    out = tmp_path_factory.mktemp("short") / "target"
    shown: dict[str, Any] = {}

    def finish(model: Any, tokenizer: Any) -> dict[str, int]:
        shown["training"] = model.training
        shown["logits"] = model(input_ids=torch.arange(200, 260)[None]).logits.detach().clone()
        return {"prompts": len(tokenizer)}

    report = short_run.run(out, provenance={"data_sha256": "abc", "command": "train"}, finish=finish)
    return {"report": report, "out": out, **shown}


def test_a_short_run_reproduces_its_loss_curve(finished: dict[str, Any]) -> None:
    """Losses within 1e-3 of the recorded ones: matrix libraries round differently, recipes differ by more."""
    expected = json.loads(short_run.REFERENCE.read_text(encoding="utf-8"))
    assert short_run.sha256(short_run.samples()) == expected["data_sha256"]
    report = finished["report"]
    assert report["tokens"] == expected["tokens"]
    assert len(report["curve"]) == len(expected["curve"]) == short_run.TRAINING.steps
    for entry, kept in zip(report["curve"], expected["curve"], strict=True):
        assert (entry["step"], entry["tokens"]) == (kept["step"], kept["tokens"])
        assert entry["loss"] == pytest.approx(kept["loss"], abs=1e-3)
        assert entry["assistant_loss"] == pytest.approx(kept["assistant_loss"], abs=1e-3)
    assert report["held_out"] == pytest.approx(expected["held_out"], abs=1e-3)


def test_training_begins_at_a_uniform_guess_and_learns(finished: dict[str, Any]) -> None:
    curve = finished["report"]["curve"]
    assert curve[0]["loss"] == pytest.approx(math.log(1024), abs=0.1)
    assert curve[-1]["loss"] < curve[0]["loss"] - 1


def test_the_report_is_kept_beside_the_weights(finished: dict[str, Any]) -> None:
    report, out = finished["report"], finished["out"]
    assert json.loads((out / "training.json").read_text(encoding="utf-8")) == json.loads(json.dumps(report))
    assert report["training"]["seed"] == 5
    assert report["parameters"] == 1_170_828
    assert report["samples"] == 40
    assert report["guard"] == {"prompts": 1024}
    assert (report["data_sha256"], report["command"]) == ("abc", "train")
    assert report["versions"] == {"torch": torch.__version__, "transformers": transformers.__version__}
    assert sorted(path.name for path in out.parent.iterdir()) == ["target"]


def test_what_was_judged_is_what_loads(finished: dict[str, Any]) -> None:
    target = Target.load(finished["out"])
    assert not finished["training"]
    logits = target.model(input_ids=torch.arange(200, 260)[None]).logits
    torch.testing.assert_close(logits, finished["logits"], rtol=0, atol=1e-6)
    assert target.mask_token_id == 3


def test_a_trained_target_is_replaced_and_leftovers_of_a_killed_run_go(tmp_path: Path) -> None:
    out, training = tmp_path / "target", TinyTraining(steps=1, rows=2, seed=1)
    for name in ("target.partial", "target.old"):
        (tmp_path / name / "deep").mkdir(parents=True)
    samples, tokenizer = short_run.samples(4), short_run.tokenizer()
    train_tiny(samples, [], tokenizer, out, SMALL, training)
    first = Target.load(out).identity
    report = train_tiny(samples, [], tokenizer, out, SMALL, training.model_copy(update={"seed": 2}))
    assert report["held_out"] is None
    assert Target.load(out).identity != first
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work", encoding="utf-8")
    for out in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(TargetError, match="no trained small target and would be replaced; give a new folder"):
            train_tiny(short_run.samples(4), [], short_run.tokenizer(), out, SMALL, TinyTraining(rows=2))
    assert (tmp_path / "thesis.txt").read_text(encoding="utf-8") == "years of work"


def test_too_few_samples_for_a_batch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError) as caught:
        train_tiny(texts(7), [], short_run.tokenizer(), tmp_path / "target", SMALL, TinyTraining(rows=8))
    assert str(caught.value) == (
        "target.training.rows: 7 samples do not fill one batch of 8; build a larger corpus or lower it"
    )
    assert not list(tmp_path.iterdir())


def test_a_batch_that_does_not_fit_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nSee documentation")

    monkeypatch.setattr(tiny, "_step_loss", full)
    with pytest.raises(OutOfMemoryError) as caught:
        train_tiny(short_run.samples(4), [], short_run.tokenizer(), tmp_path / "t", SMALL, TinyTraining(rows=4))
    assert str(caught.value) == "target.training.rows: a batch of 4 rows does not fit cpu; lower it"
    assert not list(tmp_path.iterdir())


def test_the_rate_warms_up_stays_and_falls_to_zero() -> None:
    training = TinyTraining(steps=100, warmup_steps=10, decay_fraction=0.25)
    rates = [learning_rate(step, training) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10:76] == [1.0] * 66
    assert rates[76:] == pytest.approx([left / 25 for left in range(24, 0, -1)])
    assert learning_rate(100, training) == 0.0


def test_the_rate_without_warmup_or_decay_is_constant() -> None:
    training = TinyTraining(steps=10, warmup_steps=0, decay_fraction=0.0)
    assert [learning_rate(step, training) for step in range(10)] == [1.0] * 10


def test_batches_depend_on_the_seed_alone() -> None:
    pool = texts(100)
    first, again, other = (list(islice(batches(pool, 8, seed, 0), 30)) for seed in (4, 4, 5))
    for (ids, mask), (ids_again, mask_again) in zip(first, again, strict=True):
        assert torch.equal(ids, ids_again)
        assert torch.equal(mask, mask_again)
    assert [names(ids) for ids, _ in first] != [names(ids) for ids, _ in other]


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_every_epoch_shows_every_sample_once_in_a_new_order(rows: int) -> None:
    pool = texts(320)
    source = batches(pool, rows, 0, 0)
    epochs = [[name for ids, _ in islice(source, len(pool) // rows) for name in names(ids)] for _ in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(320))
    assert epochs[0] != epochs[1] != epochs[2]


def test_what_does_not_fill_a_batch_is_left_out_by_chance() -> None:
    """Not by length: of ten texts, eight are seen each time, and the longest as often as the others."""
    pool = [Text.of(number, 10 + number) for number in range(10)]
    source = batches(pool, 4, 0, 0)
    seen = np.zeros(10)
    for _ in range(60):
        epoch = [name for ids, _ in islice(source, 2) for name in names(ids)]
        assert len(set(epoch)) == 8
        seen[epoch] += 1
    assert seen.min() >= 36  # 48 expected, standard deviation 3.1


def test_batches_hold_texts_of_about_one_length() -> None:
    pool = texts(256)
    width = [ids.shape[1] for ids, _ in islice(batches(pool, 8, 0, 0), 32)]
    at_random = [collate(pool[i : i + 8], 0)[0].shape[1] for i in range(0, 256, 8)]
    assert sum(width) < 0.75 * sum(at_random)
    assert set(width) <= {64, 128, 192}


def test_collate_pads_on_the_right_to_whole_chunks() -> None:
    ids, mask = collate([Text.of(0, 65), Text.of(1, 3)], 9)
    assert ids.dtype == torch.int64
    assert ids.shape == mask.shape == (2, 128)
    assert ids[1].tolist() == [11, 7, 7] + [9] * 125
    assert mask[1].tolist() == [0.0, 1.0, 1.0] + [0.0] * 125
    assert ids[0, 65:].tolist() == [9] * 63


def test_the_loss_weighs_assistant_tokens_others_and_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([[4, 5, 6, 7, 0, 0], [8, 9, 4, 5, 6, 1]])
    mask = torch.tensor([[0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1.0]])
    logits = torch.randn(2, 6, 10, generator=generator)
    logits[0, 1, 6] = 9.0  # one assistant token of three is right
    loss, assistant, accuracy = weighted_loss(logits, ids, mask, 0, 0.1)
    total = weight = own = 0.0
    for row in range(2):
        for place in range(1, 6):
            if ids[row, place] == 0:
                continue
            nats = -float(logits[row, place - 1].log_softmax(-1)[ids[row, place]])
            share = 1.0 if mask[row, place] else 0.1
            total, weight, own = total + share * nats, weight + share, own + float(mask[row, place]) * nats
    assert float(loss) == pytest.approx(total / weight, rel=1e-5)
    assert float(assistant) == pytest.approx(own / 3, rel=1e-5)
    right = sum(int(logits[r, p - 1].argmax() == ids[r, p]) for r, p in [(0, 2), (0, 3), (1, 5)])
    assert float(accuracy) == pytest.approx(right / 3)
    assert right >= 1


def test_a_batch_in_which_nothing_counts_gives_no_gradient() -> None:
    logits = torch.zeros(1, 4, 10, requires_grad=True)
    loss, assistant, accuracy = weighted_loss(logits, torch.tensor([[4, 5, 6, 7]]), torch.zeros(1, 4), 0, 0.0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert (float(loss.detach()), float(assistant), float(accuracy)) == (0.0, 0.0, 0.0)
    assert logits.grad is not None
    assert not logits.grad.any()


def fresh_model() -> nn.Module:
    model: nn.Module = transformers.Qwen3_5ForCausalLM(SMALL.to_config(50, 2, 0))
    for parameter in model.parameters():
        nn.init.constant_(parameter, float("nan"))
    return model


def test_initial_weights_depend_on_the_seed_alone() -> None:
    models = []
    for seed, elsewhere in ((1, 10), (1, 20), (2, 10)):
        torch.manual_seed(elsewhere)
        models.append(fresh_model())
        initialise(models[-1], seed)
    first, again, other = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_every_weight_is_initialised_by_its_role() -> None:
    model = fresh_model()
    initialise(model, 0)
    for name, parameter in model.named_parameters():
        assert bool(parameter.isfinite().all()), name
        if name.endswith("A_log"):
            assert bool((parameter.exp() <= 16.0).all())
        elif "conv1d" in name:
            assert float(parameter.detach().abs().max()) <= 0.5
        elif parameter.ndim >= 2:
            assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.4)
        else:
            ones = name.endswith(("linear_attn.norm.weight", "dt_bias"))
            assert bool((parameter == (1.0 if ones else 0.0)).all()), name


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"num_attention_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads must be a multiple of linear_num_key_heads"),
        ({"hidden_size": 4}, "'hidden_size': should be greater than or equal to 16"),
        ({"layers": 4}, "unknown key 'layers'"),
    ],
)
def test_impossible_shapes_are_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        validate(TinyShape, values, "shape")
