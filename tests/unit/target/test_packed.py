"""Packed rows: how texts are put into them, and that each text gives what it gives alone in transformers' forward."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from drafthouse.errors import TargetError
from drafthouse.target.flat import FlatTexts, packed_rows
from drafthouse.target.packed import ANSWER, NO_LABEL, OTHER, PackedModel, PackedRows, tensor_cores
from drafthouse.target.tiny import weighted_loss
from tests.unit.target.tiny_models import hybrid

PAD = 0


@dataclass(frozen=True)
class Text:
    input_ids: np.ndarray
    loss_mask: np.ndarray


def texts(lengths: list[int], seed: int = 0) -> list[Text]:
    random = np.random.default_rng(seed)
    found = []
    for length in lengths:
        mask = np.zeros(length, dtype=np.uint8)
        mask[length // 2 :] = 1
        found.append(Text(random.integers(6, 97, length).astype(np.int32), mask))
    return found


def one_row(parts: list[Text], width: int) -> PackedRows:
    """The texts in this order in one row."""
    ids, positions = np.full((1, width), PAD), np.zeros((1, width), dtype=np.int64)
    roles = np.full((1, width), NO_LABEL, dtype=np.uint8)
    at = 0
    for part in parts:
        span = slice(at, at + len(part.input_ids))
        ids[0, span], positions[0, span] = part.input_ids, np.arange(len(part.input_ids))
        roles[0, at : span.stop - 1] = np.where(part.loss_mask[1:], ANSWER, OTHER)
        at = span.stop
    positions[0, at:] = np.arange(width - at)
    return PackedRows(*map(torch.from_numpy, (ids, positions, np.roll(ids, -1, axis=1), roles)))


def alone(model: Any, part: Text) -> Tensor:
    logits: Tensor = model(input_ids=torch.from_numpy(part.input_ids.astype(np.int64))[None], use_cache=False).logits
    return logits


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return hybrid(seed=3)


def test_every_text_gives_what_it_gives_alone(model: Any) -> None:
    """Borders inside and at the end of chunks of 64, a text of one token, and one longer than a chunk."""
    parts = texts([37, 27, 1, 70, 20, 90])
    batch = one_row(parts, 256)
    hidden = PackedModel(model).hidden(batch.ids, batch.positions)
    logits = model.lm_head(model.model.norm(hidden))[0]
    at = 0
    for part in parts:
        wanted = alone(model, part)[0]
        torch.testing.assert_close(logits[at : at + len(wanted)], wanted, rtol=0, atol=2e-4)
        at += len(wanted)


def test_loss_and_gradients_equal_those_of_padded_rows(model: Any) -> None:
    parts = texts([40, 90, 62, 5], seed=1)
    loss, own, accuracy = PackedModel(model).loss(one_row(parts, 256), 0.3)
    got = torch.autograd.grad(loss, list(model.parameters()))
    width = 90
    ids, mask = torch.full((4, width), PAD), torch.zeros(4, width)
    for row, part in enumerate(parts):
        ids[row, : len(part.input_ids)] = torch.from_numpy(part.input_ids)
        mask[row, : len(part.input_ids)] = torch.from_numpy(part.loss_mask)
    padded = model(input_ids=ids, use_cache=False).logits
    expected, expected_own, expected_accuracy = weighted_loss(padded, ids, mask, PAD, 0.3)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert float(own) == pytest.approx(float(expected_own), rel=1e-5)
    assert float(accuracy) == pytest.approx(float(expected_accuracy))
    for (name, _), a, b in zip(model.named_parameters(), got, wanted, strict=True):
        assert float((a - b).norm()) <= 2e-4 * float(b.norm()) + 1e-7, name


def test_bfloat16_products_give_nearly_the_same_loss(model: Any) -> None:
    batch = one_row(texts([100, 28], seed=2), 128)
    exact, rough = (
        float(PackedModel(model, dtype).loss(batch, 1.0)[0].detach()) for dtype in (torch.float32, torch.bfloat16)
    )
    assert 0 < abs(rough - exact) < 0.02 * exact


def test_rows_in_which_nothing_counts_give_no_gradient(model: Any) -> None:
    batch = one_row(texts([60]), 64)
    nothing = PackedRows(batch.ids, batch.positions, batch.labels, torch.zeros_like(batch.roles))
    loss, own, accuracy = PackedModel(model).loss(nothing, 0.0)
    assert (float(loss.detach()), float(own), float(accuracy)) == (0.0, 0.0, 0.0)
    gradient = torch.autograd.grad(loss, model.lm_head.weight)[0]
    assert not gradient.any()


def test_products_are_precise_again_behind_the_block() -> None:
    before = torch.get_float32_matmul_precision()
    inside = []

    def fail() -> None:
        with tensor_cores():
            inside.append(torch.get_float32_matmul_precision())
            raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"):
        fail()
    assert inside == ["high"]
    assert torch.get_float32_matmul_precision() == before


def rows_of(batch: PackedRows) -> list[list[tuple[list[int], list[int]]]]:
    """Texts (ids, roles) of each row, found by their positions; padding begins a text too."""
    out = []
    for ids, positions, roles in zip(batch.ids, batch.positions, batch.roles, strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        spans = [slice(a, b) for a, b in pairwise(starts)]
        out.append([(ids[s].tolist(), roles[s].tolist()) for s in spans if int(ids[s][0]) != PAD])
    return out


def test_an_epoch_shows_every_text_once_and_rows_are_nearly_full() -> None:
    random = np.random.default_rng(5)
    pool = texts([int(length) for length in random.integers(10, 200, 600)], seed=4)
    source = packed_rows(FlatTexts.of(pool), 4, 256, 0, PAD)
    seen: dict[tuple[int, ...], int] = {}
    used = filled = 0
    while sum(seen.values()) < 1800:  # three epochs, those that wait not counted
        batch = next(source)
        used, filled = used + batch.ids.numel(), filled + int((batch.ids != PAD).sum())
        for row in rows_of(batch):
            for ids, _ in row:
                seen[tuple(ids)] = seen.get(tuple(ids), 0) + 1
    assert set(seen) == {tuple(text.input_ids.tolist()) for text in pool}
    assert set(seen.values()) <= {2, 3, 4}
    assert filled / used > 0.97


def test_labels_and_roles_follow_the_mask() -> None:
    pool = texts([10, 7])
    batch = next(packed_rows(FlatTexts.of(pool), 1, 64, 0, PAD))
    for ids, roles in rows_of(batch)[0]:
        assert ids in [text.input_ids.tolist() for text in pool]
        half = len(ids) // 2
        assert roles == [OTHER] * (half - 1) + [ANSWER] * (len(ids) - half) + [NO_LABEL]
    assert torch.equal(batch.labels[:, :-1], batch.ids[:, 1:])


def test_batches_depend_on_the_seed_alone() -> None:
    flat = FlatTexts.of(texts([30, 40, 50] * 80))
    first, again, other = (list(islice(packed_rows(flat, 2, 128, seed, PAD), 5)) for seed in (1, 1, 2))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a.ids, b.ids) for a, b in zip(first, other, strict=True))


def test_texts_longer_than_a_row_are_left_out_and_only_such_are_refused() -> None:
    flat = FlatTexts.of(texts([300, 20]))
    for batch in islice(packed_rows(flat, 1, 64, 0, PAD), 3):
        assert {len(ids) for row in rows_of(batch) for ids, _ in row} == {20}
    with pytest.raises(TargetError, match="width: no text of at most 64 tokens; give wider rows or shorter texts"):
        next(packed_rows(FlatTexts.of(texts([300])), 1, 64, 0, PAD))


def test_joined_texts_are_the_same_texts() -> None:
    pool = texts([5, 9, 3])
    joined = FlatTexts.joined([FlatTexts.of(pool[:2]), FlatTexts.of([]), FlatTexts.of(pool[2:])])
    assert len(joined) == 3
    assert joined.lengths.tolist() == [5, 9, 3]
    for number, part in enumerate(pool):
        ids, mask = joined.text(number)
        assert ids.tolist() == part.input_ids.tolist()
        assert mask.tolist() == part.loss_mask.tolist()
    assert joined.sha256() == FlatTexts.of(pool).sha256()
    assert joined.sha256() != FlatTexts.of(texts([5, 3, 9])).sha256()
