"""Losses and slot weights against plain, written-out references."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F

from drafthouse.drafter.losses import BlockLoss, LossSettings, Teacher, block_loss
from drafthouse.drafter.weights import decay_weights, default_gamma, dpace_weights, streak_weights
from tests.unit.drafter.doubles import Head

ROWS, LENGTH, BLOCK, HIDDEN, VOCAB = 2, 12, 4, 8, 11
HEAD = Head(VOCAB, HIDDEN)

CASES: list[dict[str, Any]] = [
    {"weights": "uniform"},
    {"weights": "decay"},
    {"weights": "decay", "gamma": 2.0, "soft_weight": 1.0},
    {"weights": "dpace", "alpha": 0.3},
    {"weights": "dpace", "soft_weight": 0.4, "temperature": 2.0, "acceptance": "overlap"},
    {"weights": "streak"},
    {"weights": "streak", "soft_weight": 0.7, "temperature": 1.5, "streak_decay": True},
    {"weights": "streak", "soft_weight": 1.0, "acceptance": "overlap", "alpha": 0.0},
]


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    mask = torch.zeros(ROWS, LENGTH, dtype=torch.uint8)
    mask[0, 3:] = 1
    mask[0, 7] = 0  # a hole inside blocks
    mask[1, 2:9] = 1
    return {
        "hidden": torch.randn(ROWS, 5, BLOCK, HIDDEN, generator=generator),
        "anchors": torch.tensor([[3, 5, 9, 10, 11], [0, 2, 6, 7, -1]]),
        "ids": torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator),
        "mask": mask,
        "last": torch.randn(ROWS, LENGTH, HIDDEN, generator=generator),
    }


def compute(data: dict[str, Tensor], settings: LossSettings, **extra: Any) -> BlockLoss:
    teacher = Teacher(data["last"], HEAD.final_norm, HEAD.lm_head) if settings.soft_weight else None
    return block_loss(
        data["hidden"],
        data["anchors"],
        data["ids"],
        data["mask"],
        HEAD.lm_head,
        settings,
        teacher=teacher,
        **extra,
    )


def reference(data: dict[str, Tensor], settings: LossSettings) -> tuple[Tensor, float]:
    """(sum w l, sum w), slot by slot."""
    numerator, weight_sum = torch.zeros(()), 0.0
    gamma = settings.gamma or default_gamma(BLOCK)
    for row in range(ROWS):
        for block, anchor in enumerate(data["anchors"][row].tolist()):
            if anchor < 0:
                continue
            losses: list[Tensor | None] = []
            q: list[float] = []
            for k in range(1, BLOCK):
                position = anchor + k
                if position >= LENGTH or not data["mask"][row, position]:
                    losses.append(None)
                    q.append(0.0)
                    continue
                logits = data["hidden"][row, block, k] @ HEAD.output.T
                label = data["ids"][row, position]
                hard = F.cross_entropy(logits, label)
                teacher = HEAD.final_norm(data["last"][row, position - 1]) @ HEAD.output.T
                t = settings.temperature
                soft = F.kl_div(
                    (logits / t).log_softmax(-1),
                    (teacher / t).log_softmax(-1),
                    reduction="sum",
                    log_target=True,
                )
                losses.append((1 - settings.soft_weight) * hard + settings.soft_weight * t * t * soft)
                if settings.acceptance == "overlap":
                    q.append(float(torch.minimum(logits.detach().softmax(-1), teacher.softmax(-1)).sum()))
                else:
                    q.append(float(logits.detach().softmax(-1)[label]))
            smooth = [
                0.0 if loss is None else (1 - settings.alpha) * p + settings.alpha
                for loss, p in zip(losses, q, strict=True)
            ]
            for k, loss in enumerate(losses, start=1):
                if loss is None:
                    continue
                decay = math.exp(-(k - 1) / gamma)
                if settings.weights == "uniform":
                    w = 1.0
                elif settings.weights == "decay":
                    w = decay
                elif settings.weights == "dpace":
                    w = sum(math.prod(smooth[:m]) for m in range(k, BLOCK))
                else:
                    w = math.prod(smooth[: k - 1]) * (decay if settings.streak_decay else 1.0)
                numerator = numerator + w * loss
                weight_sum += w
    return numerator, weight_sum


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_loss_and_gradient_equal_the_written_out_sum(case: dict[str, Any], chunk: int) -> None:
    settings = LossSettings(**case, chunk_blocks=chunk)
    data = batch()
    data["hidden"].requires_grad_()
    numerator, weight = reference(data, settings)
    numerator.backward()
    expected = data["hidden"].grad
    assert expected is not None
    data["hidden"] = data["hidden"].detach().requires_grad_()
    loss = compute(data, settings)
    torch.testing.assert_close(loss.numerator, numerator)
    assert float(loss.weight) == pytest.approx(weight, rel=1e-5)
    torch.testing.assert_close(loss.mean, numerator / weight)
    loss.numerator.backward()
    assert data["hidden"].grad is not None
    torch.testing.assert_close(data["hidden"].grad, expected, rtol=1e-4, atol=1e-6)
    assert not data["hidden"].grad[:, :, 0].any()  # slot 0 is known, never trained


def test_soft_labels_come_from_the_position_before() -> None:
    """A drafter that outputs the target's own normed state of position a+k-1 at slot k has no divergence."""
    data = batch()
    normed = HEAD.final_norm(data["last"])
    for row in range(ROWS):
        for block, anchor in enumerate(data["anchors"][row].tolist()):
            for k in range(1, BLOCK):
                if anchor >= 0 and anchor + k < LENGTH:
                    data["hidden"][row, block, k] = normed[row, anchor + k - 1]
    loss = compute(data, LossSettings(soft_weight=1.0))
    assert float(loss.mean) == pytest.approx(0.0, abs=1e-6)
    summary = loss.sums.summary()
    assert summary.get("kl", 0.0) == pytest.approx(0.0, abs=1e-6)


def test_micro_batches_add_up_exactly() -> None:
    data, settings = batch(), LossSettings(weights="streak", soft_weight=0.5)
    whole = compute(data, settings)
    parts = [compute({k: v[i : i + 1] for k, v in data.items()}, settings) for i in range(ROWS)]
    torch.testing.assert_close(parts[0].numerator + parts[1].numerator, whole.numerator)
    torch.testing.assert_close(parts[0].weight + parts[1].weight, whole.weight)
    summed = (parts[0].sums + parts[1].sums).summary()
    assert summed == {k: pytest.approx(v) for k, v in whole.sums.summary().items()}


def test_metrics_count_what_they_say() -> None:
    data = batch()
    loss = compute(data, LossSettings(soft_weight=0.0, weights="decay"), entropy=True)
    summary = loss.sums.summary()
    right, labels = torch.zeros(BLOCK - 1), torch.zeros(BLOCK - 1)
    streaks, expected, entropy, blocks = 0.0, 0.0, 0.0, 0
    for row in range(ROWS):
        for block, anchor in enumerate(data["anchors"][row].tolist()):
            alive, chance, counted = 1.0, 1.0, False
            for k in range(1, BLOCK):
                if anchor < 0 or anchor + k >= LENGTH or not data["mask"][row, anchor + k]:
                    alive = chance = 0.0
                    continue
                counted = True
                q = (data["hidden"][row, block, k] @ HEAD.output.T).softmax(-1)
                label = int(data["ids"][row, anchor + k])
                correct = float(int(q.argmax()) == label)
                right[k - 1] += correct
                labels[k - 1] += 1
                alive, chance = alive * correct, chance * float(q[label])
                streaks, expected = streaks + alive, expected + chance
                entropy -= float((q * q.log()).sum())
            blocks += counted
    assert summary["accuracy"] == pytest.approx((right / labels).tolist())
    assert summary["blocks"] == blocks
    assert summary["mean_streak"] == pytest.approx(streaks / blocks)
    assert summary["expected_streak"] == pytest.approx(expected / blocks)
    assert summary["entropy"] == pytest.approx(entropy / float(labels.sum()))
    assert summary["slot_weight"] == pytest.approx(decay_weights(BLOCK - 1, default_gamma(BLOCK)).tolist())


def test_vocabulary_tensors_stay_within_a_chunk() -> None:
    """No call of the lm_head, student or teacher, sees more than one chunk's labels; masked slots are left
    out."""
    data, head = batch(), Head(VOCAB, HIDDEN)
    settings = LossSettings(soft_weight=1.0, chunk_blocks=2)
    teacher = Teacher(data["last"], head.final_norm, head.lm_head)
    data["hidden"].requires_grad_()
    loss = block_loss(
        data["hidden"], data["anchors"], data["ids"], data["mask"], head.lm_head, settings, teacher=teacher
    )
    assert max(head.lm_head_rows) <= 2 * (BLOCK - 1)
    student, taught = sum(head.lm_head_rows[::2]), sum(head.lm_head_rows[1::2])
    assert student == int(loss.sums.labels.sum())
    assert taught < student  # overlapping blocks share their teacher rows
    before = len(head.lm_head_rows)
    loss.numerator.backward()
    assert len(head.lm_head_rows) == before  # nothing is recomputed


def test_a_batch_without_labels_gives_nothing() -> None:
    data = batch()
    data["mask"].zero_()
    data["hidden"].requires_grad_()
    loss = compute(data, LossSettings(soft_weight=0.5))
    assert [t.item() for t in (loss.numerator, loss.weight, loss.mean)] == [0.0, 0.0, 0.0]
    loss.numerator.backward()
    assert data["hidden"].grad is not None
    assert not data["hidden"].grad.any()


def test_weights_carry_no_gradient() -> None:
    """With alpha 0 the weights follow q closely; the gradient must still be that of constants."""
    data = batch()
    data["hidden"].requires_grad_()
    settings = LossSettings(weights="streak", alpha=0.0)
    compute(data, settings).numerator.backward()
    numerator, _ = reference(other := {**data, "hidden": data["hidden"].detach().requires_grad_()}, settings)
    numerator.backward()  # the reference takes q as floats
    assert data["hidden"].grad is not None
    torch.testing.assert_close(data["hidden"].grad, other["hidden"].grad, rtol=1e-4, atol=1e-6)


def test_published_decay_constants() -> None:
    assert [default_gamma(b) for b in (7, 8, 10, 16)] == [4.0, 4.0, 5.0, 7.0]
    assert default_gamma(13) == pytest.approx(6.0)
    assert default_gamma(32) == pytest.approx(14.0)
    assert decay_weights(3, 4.0).tolist() == pytest.approx([1.0, math.exp(-0.25), math.exp(-0.5)])


def test_dynamic_weights_by_hand() -> None:
    q, valid = torch.tensor([[0.5, 0.2, 0.8]]), torch.tensor([[True, True, True]])
    assert streak_weights(q, valid, 0.0)[0].tolist() == pytest.approx([1.0, 0.5, 0.1])
    assert dpace_weights(q, valid, 0.0)[0].tolist() == pytest.approx([0.5 + 0.1 + 0.08, 0.1 + 0.08, 0.08])
    assert streak_weights(q, valid, 1.0)[0].tolist() == [1.0, 1.0, 1.0]
    assert dpace_weights(q, valid, 1.0)[0].tolist() == [3.0, 2.0, 1.0]
    hole = torch.tensor([[True, False, True]])
    assert streak_weights(q, hole, 0.5)[0].tolist() == pytest.approx([1.0, 0.0, 0.0])
    assert dpace_weights(q, hole, 0.0)[0].tolist() == pytest.approx([0.5, 0.0, 0.0])


def test_settings_that_contradict_themselves() -> None:
    with pytest.raises(ValidationError, match="'overlap' needs the target's distribution"):
        LossSettings(soft_weight=0.0, weights="streak", acceptance="overlap")
    with pytest.raises(ValidationError, match="streak_decay has no meaning with weights 'dpace'"):
        LossSettings(weights="dpace", streak_decay=True)
    data, soft = batch(), LossSettings(soft_weight=0.5)
    with pytest.raises(ValueError, match="needs a teacher"):
        block_loss(data["hidden"], data["anchors"], data["ids"], data["mask"], HEAD.lm_head, soft)
