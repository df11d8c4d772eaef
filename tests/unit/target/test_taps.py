"""What a layer id means, and that the final norm is applied once: no off-by-one may pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from drafthouse.errors import TargetError
from drafthouse.target import Target
from tests.unit.target.tiny_models import dense, hybrid, wrapped

LENGTHS = torch.tensor([9, 4])
ARCHITECTURES = pytest.mark.parametrize("make", [hybrid, dense, wrapped])


def token_ids(rows: int = 2, length: int = 9, vocab: int = 90) -> Tensor:
    return torch.randint(6, vocab, (rows, length), generator=torch.Generator().manual_seed(3))


class AddPowerOfTen(nn.Module):
    """In place of decoder layer i: adds 10**i, so a state names exactly the layers that made it."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states + 10.0**self.layer


def counting(make: Callable[..., nn.Module]) -> Target:
    """A target whose embedding is zero and whose layers can be told apart."""
    target = Target(make())
    for layer in range(target.num_layers):
        target.layers[layer] = AddPowerOfTen(layer)
    nn.init.zeros_(cast(nn.Embedding, target.decoder.embed_tokens).weight)
    return target


@ARCHITECTURES
@pytest.mark.parametrize("layer_ids", [(), (0,), (3,), (0, 2), (1, 2, 3), (0, 1, 2, 3)])
def test_an_id_is_the_output_of_that_layer_and_the_last_slot_is_not_normed(
    make: Callable[..., nn.Module], layer_ids: tuple[int, ...]
) -> None:
    states = counting(make).capture(token_ids(), LENGTHS, layer_ids)
    made_by = [1.0, 11.0, 111.0, 1111.0]
    expected = [made_by[layer] for layer in layer_ids] + [1111.0]
    assert states.shape == (2, 9, len(layer_ids) + 1, 32)
    assert torch.equal(states, torch.tensor(expected)[:, None].expand_as(states))


@ARCHITECTURES
def test_taps_are_transformers_hidden_states_shifted_by_one(make: Callable[..., nn.Module]) -> None:
    target, ids = Target(make()), token_ids()
    states = target.capture(ids, LENGTHS, (0, 1, 2, 3))
    whole = cast(Any, target.decoder)(input_ids=ids, output_hidden_states=True)
    for layer in range(3):
        assert torch.equal(states[:, :, layer], whole.hidden_states[layer + 1])
        assert not torch.equal(states[:, :, layer], whole.hidden_states[layer])
    # Transformers hands out the last layer after the norm only.
    assert not torch.allclose(states[:, :, 3], whole.hidden_states[4], atol=0.1)
    assert torch.equal(states[:, :, 3], states[:, :, 4])
    assert torch.equal(target.final_norm(states[:, :, 4]), whole.last_hidden_state)


@ARCHITECTURES
def test_norm_and_head_give_the_models_own_logits(make: Callable[..., nn.Module]) -> None:
    target, ids = Target(make()), token_ids()
    last = target.capture(ids, LENGTHS, ())[:, :, 0]
    logits = cast(Any, target.model)(input_ids=ids).logits
    torch.testing.assert_close(target.lm_head(target.final_norm(last)), logits, rtol=0, atol=1e-5)
    twice = target.lm_head(target.final_norm(target.final_norm(last)))
    never = target.lm_head(last)
    assert not torch.allclose(twice, logits, atol=0.05)
    assert not torch.allclose(never, logits, atol=0.05)


def test_the_norm_of_qwen3_5_scales_by_one_plus_its_weight() -> None:
    target, ids = Target(hybrid()), token_ids()
    last = target.capture(ids, LENGTHS, ())[:, :, 0]
    weight = cast(Any, target.decoder).norm.weight
    unit = last * torch.rsqrt(last.square().mean(-1, keepdim=True) + target.config.rms_norm_eps)
    normed = target.final_norm(last)
    torch.testing.assert_close(normed, unit * (1 + weight), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(normed, unit * weight, atol=0.05)


def test_the_norm_of_dense_qwen3_scales_by_its_weight() -> None:
    target, ids = Target(dense()), token_ids()
    last = target.capture(ids, LENGTHS, ())[:, :, 0]
    unit = last * torch.rsqrt(last.square().mean(-1, keepdim=True) + target.config.rms_norm_eps)
    weight = cast(Any, target.decoder).norm.weight
    torch.testing.assert_close(target.final_norm(last), unit * weight, rtol=1e-5, atol=1e-6)


def test_the_multimodal_wrapper_gives_the_taps_of_its_text_model() -> None:
    wrapper, text = wrapped(), hybrid(seed=1)
    own = cast(nn.Module, cast(Any, wrapper).model.language_model).state_dict()
    weights = {f"model.{name}": value for name, value in own.items()}
    text.load_state_dict(weights | {"lm_head.weight": cast(Any, wrapper).lm_head.weight})
    ids, pair = token_ids(), (Target(wrapper), Target(text))
    assert [t.num_layers for t in pair] == [4, 4]
    assert [t.hidden_size for t in pair] == [32, 32]
    assert [t.vocab_size for t in pair] == [97, 97]
    assert [t.layer_types for t in pair] == [["linear_attention"] * 3 + ["full_attention"]] * 2
    taps = [target.capture(ids, LENGTHS, (0, 2)) for target in pair]
    assert torch.equal(*taps)
    assert torch.equal(*(target.embed(ids) for target in pair))
    assert torch.equal(*(target.lm_head(target.final_norm(taps[0][:, :, -1])) for target in pair))


@ARCHITECTURES
def test_right_padding_changes_nothing(make: Callable[..., nn.Module]) -> None:
    """What the padding holds: difference 0.0. How wide it is: rounding, as matrices of other shapes do."""
    target, ids, length = Target(make()), token_ids(2, 90), torch.tensor([23, 90])
    other = ids.clone()
    other[0, 23:] = 0
    states = target.capture(ids, length, (0, 1, 3))
    difference = states - target.capture(other, length, (0, 1, 3))
    assert float(difference[0, :23].abs().max()) == 0.0
    assert float(difference[1].abs().max()) == 0.0
    assert float(difference[0, 23:].abs().max()) > 0.1
    alone = target.capture(ids[:1, :23], length[:1], (0, 1, 3))
    torch.testing.assert_close(states[:1, :23], alone, rtol=1e-4, atol=1e-4)


def test_rows_do_not_see_each_other() -> None:
    target, ids = Target(hybrid()), token_ids(3)
    together = target.capture(ids, torch.tensor([9, 9, 9]), (1,))
    for row in range(3):
        alone = target.capture(ids[row : row + 1], torch.tensor([9]), (1,))
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-5, atol=1e-5)


def test_capture_fills_the_buffer_that_it_is_given() -> None:
    target, ids = Target(hybrid()), token_ids()
    buffer = torch.full((2, 9, 3, 32), float("nan"), dtype=torch.bfloat16)
    assert target.capture(ids, LENGTHS, (0, 2), out=buffer) is buffer
    assert torch.equal(buffer, target.capture(ids, LENGTHS, (0, 2)).bfloat16())


@pytest.mark.parametrize("shape", [(2, 9, 2, 32), (2, 9, 4, 32), (4, 9, 3, 32), (2, 8, 3, 32)])
def test_a_buffer_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    buffer = torch.zeros(shape)
    with pytest.raises(ValueError, match=r"the buffer is .* but the capture fills \[2, 9, 3, 32\]"):
        Target(hybrid()).capture(token_ids(), LENGTHS, (0, 2), out=buffer)
    assert not buffer.any()


def test_a_failed_capture_leaves_no_hook_behind() -> None:
    target = Target(hybrid())
    with pytest.raises(IndexError):
        target.capture(token_ids() + 1000, LENGTHS, (0, 2))
    assert all(not layer._forward_hooks for layer in target.layers)


@pytest.mark.parametrize(
    ("layer_ids", "problem"),
    [
        ((4,), "layer id 4 is out of range: this target has decoder layers 0 to 3"),
        ((0, -1), "layer id -1 is out of range"),
        ((2, 1), r"layer ids \[2, 1\] do not rise strictly"),
        ((1, 1), r"layer ids \[1, 1\] do not rise strictly"),
    ],
)
def test_layer_ids_that_name_no_tap_are_refused(layer_ids: tuple[int, ...], problem: str) -> None:
    with pytest.raises(TargetError, match=problem) as caught:
        Target(hybrid()).capture(token_ids(), LENGTHS, layer_ids)
    assert "\n" not in str(caught.value)


def test_another_architecture_is_refused() -> None:
    with pytest.raises(TargetError, match="architecture Linear is not supported; use one of Qwen3_5ForCausalLM"):
        Target(nn.Linear(2, 2))


def test_a_target_is_frozen() -> None:
    model = hybrid().train()
    target = Target(model)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert not target.capture(token_ids(), LENGTHS, (0,)).requires_grad
