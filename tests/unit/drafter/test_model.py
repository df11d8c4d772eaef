"""The drafter against a plain re-statement of itself, against its own cached use, and against leaks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafthouse.drafter.attention import Bias, Implementation, attend, block_mask
from drafthouse.drafter.config import FULL, SLIDING, DrafterConfig
from drafthouse.drafter.model import DFlashDrafter
from tests.unit.drafter import oracle
from tests.unit.drafter.doubles import tiny_config

IMPLEMENTATIONS: list[Implementation] = ["split", "dense", "flex"]  # on a CPU, flex trains through dense
KINDS = [(FULL, FULL), (SLIDING, FULL), (SLIDING, SLIDING)]


def build(kinds: tuple[str, ...] = (SLIDING, FULL), window: int = 5) -> DFlashDrafter:
    config = tiny_config(layer_types=kinds, sliding_window=window if SLIDING in kinds else None)
    model = DFlashDrafter(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # weights large enough that every part of the layer matters, norms unlike 1
        for parameter in model.parameters():
            drawn = torch.empty(parameter.shape).normal_(generator=generator)
            parameter.copy_(1 + 0.3 * drawn if parameter.dim() == 1 else 0.3 * drawn)
    return model


def inputs(config: DrafterConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """taps [2, 11, K, H], embeddings [2, 4, B, H], anchors [2, 4], context_positions [2, 11]."""
    generator = torch.Generator().manual_seed(2)
    taps = torch.randn(2, 11, config.num_taps, config.hidden_size, generator=generator)
    embeddings = torch.randn(2, 4, config.block_size, config.hidden_size, generator=generator)
    anchors = torch.tensor([[0, 1, 6, 10], [3, 4, 7, -1]])
    positions = torch.arange(11).repeat(2, 1)
    positions[1, 8:] = -1
    return taps, embeddings, anchors, positions


def test_tensor_names_are_those_of_published_checkpoints() -> None:
    layer = ["input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    layer += [f"self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    names = {f"layers.{n}.{x}.weight" for n in range(2) for x in layer}
    names |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
    state = DFlashDrafter(tiny_config()).state_dict()
    assert set(state) == names
    assert len(names) == 11 * 2 + 3
    assert state["fc.weight"].shape == (16, 2 * 16)
    assert state["layers.0.self_attn.q_proj.weight"].shape == (32, 16)
    assert state["layers.1.self_attn.k_norm.weight"].shape == (8,)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = DFlashDrafter(tiny_config())
    torch.manual_seed(2)
    second = DFlashDrafter(tiny_config())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    second.reset_parameters(1)
    assert not torch.equal(first.fc.weight, second.fc.weight)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_the_plain_oracle(implementation: Implementation, kinds: tuple[str, ...]) -> None:
    model = build(kinds)
    model.attention = implementation
    taps, embeddings, anchors, positions = inputs(model.config)
    with torch.no_grad():
        hidden = model(taps, embeddings, anchors, positions)
        weights = model.state_dict()
        for row in range(2):
            for block, anchor in enumerate(anchors[row].tolist()):
                if anchor < 0:
                    assert not hidden[row, block].any()
                    continue
                expected = oracle.forward(
                    model.config,
                    weights,
                    taps[row].flatten(1),
                    embeddings[row, block],
                    anchor,
                    positions[row].tolist(),
                )
                torch.testing.assert_close(hidden[row, block], expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    anchor=st.integers(-1, 12),
    length=st.integers(0, 12),
    block=st.integers(1, 6),
    window=st.one_of(st.none(), st.integers(1, 9)),
)
def test_masks_follow_the_rule_for_every_pair(anchor: int, length: int, block: int, window: int | None) -> None:
    """Both forms of the mask, pair by pair."""
    positions = [t if t % 5 != 4 else -1 for t in range(length)]
    mask = block_mask(torch.tensor([[anchor, 3]]), torch.tensor([positions], dtype=torch.int64), block, window)
    context = mask.context.expand(1, 2, block, length)
    dense = mask.dense()[0, 0]
    for j in range(block):
        row = dense[j]
        for t, position in enumerate(positions):
            expected = (
                anchor >= 0
                and position >= 0
                and oracle.visible(
                    anchor + j,
                    position,
                    key_is_context=True,
                    anchor=anchor,
                    sliding=window is not None,
                    window=window,
                )
            )
            assert bool(context[0, 0, j, t]) is expected
            assert bool(row[t]) is expected
        for i in range(block):
            expected = oracle.visible(j, i, key_is_context=False, anchor=0, sliding=window is not None, window=window)
            assert bool(mask.own[j, i]) is expected
            assert bool(row[length + i]) is expected
            assert not row[length + block + i]  # the other block


@pytest.mark.parametrize("kinds", KINDS)
def test_all_implementations_agree_in_value_and_gradient(kinds: tuple[str, ...]) -> None:
    model = build(kinds)
    taps, embeddings, anchors, positions = inputs(model.config)
    weight = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(3))
    results = []
    for implementation in IMPLEMENTATIONS:
        model.attention = implementation
        model.zero_grad()
        leaves = [taps.clone().requires_grad_(), embeddings.clone().requires_grad_()]
        hidden = model(*leaves, anchors, positions)
        (hidden * weight).sum().backward()
        gradients = [*leaves, *model.parameters()]
        results.append([hidden.detach()] + [leaf.grad.clone() for leaf in gradients if leaf.grad is not None])
    assert len(results[0]) == len(results[1]) == len(results[2]) == 3 + len(list(model.parameters()))
    for split, dense, flex in zip(*results, strict=True):
        torch.testing.assert_close(split, dense, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(flex, dense)


@pytest.mark.parametrize("window", [None, 3])
def test_split_gradient_is_exact(window: int | None) -> None:
    """The hand-written backward pass against finite differences in fp64."""
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    places = torch.tensor([[0, 1, 2, 3, -1]])
    bias = Bias.of(torch.tensor([[0, 4]]), places, 3, window, "split", torch.float64)
    q, k, v = draw(1, 2, 3, 4, 2), draw(1, 2, 5, 2), draw(1, 2, 5, 2)
    own_k, own_v = draw(1, 2, 3, 2, 2), draw(1, 2, 3, 2, 2)
    assert torch.autograd.gradcheck(lambda q, k, v, a, b: attend(q, (k, v), (a, b), bias), (q, k, v, own_k, own_v))


def test_extreme_scores_stay_exact() -> None:
    """A masked key that outscores every visible one by far must not disturb the softmax."""
    anchors, places = torch.tensor([[2]]), torch.tensor([[0, 1, 2, 3]])
    q = torch.full((1, 1, 2, 1, 4), 30.0)
    k = torch.ones(1, 1, 4, 4) * torch.tensor([1.0, 2.0, 40.0, 90.0])[:, None]
    v = torch.arange(16.0).view(1, 1, 4, 4)
    own = torch.ones(1, 1, 2, 1, 4), -torch.ones(1, 1, 2, 1, 4)
    outputs = [attend(q, (k, v), own, Bias.of(anchors, places, 2, None, i, torch.float32)) for i in IMPLEMENTATIONS]
    for other in outputs[1:]:
        torch.testing.assert_close(outputs[0], other)
    torch.testing.assert_close(outputs[0][0, 0, 0], v[0, 0, 1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_block_without_context_works(implementation: Implementation) -> None:
    model = build()
    model.attention = implementation
    taps, embeddings, anchors, positions = inputs(model.config)
    with torch.no_grad():
        usual = model(taps, embeddings, anchors, positions)[:1, :1]
        kv = model.context_kv(model.context(taps[:1, :0]), positions[:1, :0])
        empty = model.blocks(embeddings[:1, :1], anchors[:1, :1], kv, positions[:1, :0])
    assert torch.isfinite(usual).all()
    torch.testing.assert_close(empty, usual)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_invalid_blocks_are_zero_and_carry_no_gradient(implementation: Implementation) -> None:
    model = build()
    model.attention = implementation
    taps, embeddings, anchors, positions = inputs(model.config)
    anchors = torch.full_like(anchors, -1)
    taps.requires_grad_()
    embeddings.requires_grad_()
    hidden = model(taps, embeddings, anchors, positions)
    assert not hidden.any()
    hidden.sum().backward()
    for leaf in [taps, embeddings, *model.parameters()]:
        assert leaf.grad is None or not leaf.grad.any()


def test_cached_decoding_equals_the_training_pass() -> None:
    """All anchors of a row at once, against one block at a time over a cache that grows by uneven steps."""
    model = build()
    taps, embeddings, anchors, positions = inputs(model.config)
    anchors = torch.tensor([[1, 4, 5, 10], [1, 4, 5, 7]])
    with torch.no_grad():
        training = model(taps, embeddings, anchors, positions)
        for row in range(2):
            cache: list[tuple[Tensor, Tensor]] | None = None
            done = 0
            for block, anchor in enumerate(anchors[row].tolist()):
                new = slice(done, anchor)
                grown = model.context_kv(model.context(taps[row : row + 1, new]), positions[row : row + 1, new])
                if cache is None:
                    cache = grown
                else:
                    cache = [
                        (torch.cat([old_k, k], 2), torch.cat([old_v, v], 2))
                        for (old_k, old_v), (k, v) in zip(cache, grown, strict=True)
                    ]
                done = anchor
                hidden = model.blocks(
                    embeddings[row : row + 1, block : block + 1],
                    anchors[row : row + 1, block : block + 1],
                    cache,
                    torch.arange(anchor)[None],
                )
                torch.testing.assert_close(hidden[0, 0], training[row, block], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_leaks_into_a_block(implementation: Implementation, kinds: tuple[str, ...]) -> None:
    """Exactly zero gradient from context at or after the anchor, from padding, other rows and other
    blocks."""
    model = build(kinds)
    model.attention = implementation
    taps, embeddings, anchors, positions = inputs(model.config)
    row, block = 1, 1  # anchored at 4
    taps.requires_grad_()
    embeddings.requires_grad_()
    hidden = model(taps, embeddings, anchors, positions)
    weight = torch.randn(hidden.shape[2:], generator=torch.Generator().manual_seed(6))
    (hidden[row, block] * weight).sum().backward()
    assert taps.grad is not None
    assert embeddings.grad is not None
    by_token = taps.grad.abs().sum((2, 3))
    assert (by_token[row, :4] > 0).all()
    assert not by_token[row, 4:].any()
    assert not by_token[1 - row].any()
    by_block = embeddings.grad.abs().sum((2, 3))
    assert by_block[row, block] > 0
    by_block[row, block] = 0
    assert not by_block.any()


def test_slots_see_each_other_as_their_layers_allow() -> None:
    for kinds, later_matters in (((FULL, FULL), True), ((SLIDING, SLIDING), False)):
        model = build(kinds, window=8)
        taps, embeddings, anchors, positions = inputs(model.config)
        embeddings.requires_grad_()
        model(taps, embeddings, anchors, positions)[0, 2, 1].square().mul(torch.arange(16)).sum().backward()
        assert embeddings.grad is not None
        by_slot = embeddings.grad[0, 2].abs().sum(-1)
        assert (by_slot[:2] > 0).all()
        assert bool(by_slot[2:].any()) is later_matters


def test_autocast_stays_close_and_trains() -> None:
    model = build()
    args = inputs(model.config)
    plain = model(*args)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model(*args)
        (hidden * torch.randn_like(hidden)).sum().backward()
    assert (hidden.float() - plain).abs().mean() < 0.1 * plain.abs().mean()
    assert all(torch.isfinite(p.grad).all() and p.grad.any() for p in model.parameters() if p.grad is not None)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_taps_may_come_flat_or_stacked_and_in_bf16() -> None:
    model = build()
    taps = inputs(model.config)[0]
    torch.testing.assert_close(model.context(taps.flatten(2)), model.context(taps))
    assert model.context(taps.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_documents_packed_into_a_row_do_not_see_each_other(
    implementation: Implementation, kinds: tuple[str, ...]
) -> None:
    model = build(kinds)
    model.attention = implementation
    taps, embeddings, anchors, positions = inputs(model.config)
    with torch.no_grad():
        apart = model(taps, embeddings, anchors, positions)
        real, valid = positions >= 0, anchors >= 0
        rows = torch.arange(2)[:, None]
        packed = model(
            taps[real][None],
            embeddings[valid][None],
            anchors[valid][None],
            positions[real][None],
            (rows.expand(anchors.shape)[valid][None], rows.expand(positions.shape)[real][None]),
        )
    torch.testing.assert_close(packed[0], apart[valid], rtol=1e-4, atol=1e-5)
