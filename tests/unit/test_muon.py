"""Our Muon is torch's, in float32: same update rule, an orthogonal direction, and the same state to resume."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import _muon

from drafthouse.muon import Muon, orthogonalise

COEFFICIENTS = (3.4445, -4.775, 2.0315)
SHAPES = [(6, 6), (4, 9), (11, 5)]


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for weight, gradient in zip(weights, gradients(step), strict=True):
            weight.grad = gradient.clone()
        optimizer.step()


def library(weights: list[nn.Parameter], **changes: Any) -> torch.optim.Optimizer:
    values: dict[str, Any] = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
    return torch.optim.Muon(weights, **values | changes)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 999))
def test_five_steps_bring_the_singular_values_near_one(rows: int, columns: int, seed: int) -> None:
    """The quintic maps every singular value of moderate size into about [0.7, 1.2] and turns no direction."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    matrix = left @ torch.diag(values.clamp_min(0.2 * values.max())) @ right
    made = orthogonalise(matrix, COEFFICIENTS, 5, 1e-7)
    assert made.shape == matrix.shape
    turned = left.T @ made @ right.T
    diagonal = turned.diagonal()
    assert float(diagonal.min()) > 0.6
    assert float(diagonal.max()) < 1.3
    torch.testing.assert_close(turned, torch.diag(diagonal), rtol=0, atol=1e-8)


def test_a_zero_gradient_gives_a_zero_direction() -> None:
    assert not orthogonalise(torch.zeros(3, 4), COEFFICIENTS, 5, 1e-7).any()


@pytest.mark.parametrize("changes", [{}, {"weight_decay": 0.1}, {"momentum": 0.5}])
def test_updates_are_torchs_apart_from_its_bfloat16(changes: dict[str, float]) -> None:
    ours, theirs = parameters(), parameters()
    train(Muon(ours, lr=0.02, **changes), ours, range(6))
    train(library(theirs, **changes), theirs, range(6))
    for one, other, start in zip(ours, theirs, parameters(), strict=True):
        moved = float((other - start).detach().norm())
        assert float((one - other).detach().norm()) < 0.05 * moved
        assert moved > 0.05


@pytest.mark.parametrize("changes", [{}, {"weight_decay": 0.1}, {"momentum": 0.5}])
def test_with_its_iteration_in_float32_torchs_updates_are_ours(
    changes: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exact(matrix: Tensor, coefficients: Any, steps: int, eps: float) -> Tensor:
        return orthogonalise(matrix, coefficients, steps, eps)

    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", exact)
    ours, theirs = parameters(), parameters()
    train(Muon(ours, lr=0.02, **changes), ours, range(6))
    train(library(theirs, **changes), theirs, range(6))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_an_update_has_about_the_size_of_adamws() -> None:
    """0.2 of the rate, root mean square, whatever the shape (`match_rms_adamw`)."""
    weights = parameters()
    train(Muon(weights, lr=0.02), weights, range(1))
    for weight, start in zip(weights, parameters(), strict=True):
        assert float((weight - start).detach().square().mean().sqrt()) == pytest.approx(0.2 * 0.02, rel=0.3)


def test_training_resumes_to_the_same_bits() -> None:
    whole, part = parameters(), parameters()
    train(Muon(whole, lr=0.02), whole, range(5))
    first = Muon(part, lr=0.02)
    train(first, part, range(2))
    kept = copy.deepcopy(first.state_dict())
    resumed = [nn.Parameter(weight.detach().clone()) for weight in part]
    second = Muon(resumed, lr=0.5)
    second.load_state_dict(kept)
    train(second, resumed, range(2, 5))
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))


def test_parameters_without_gradient_stay() -> None:
    weights = parameters()
    optimizer = Muon(weights, lr=0.02, weight_decay=0.1)
    weights[0].grad = gradients(0)[0]
    optimizer.step()
    moved = [not torch.equal(one, other) for one, other in zip(weights, parameters(), strict=True)]
    assert moved == [True, False, False]


def test_a_closure_is_called_with_gradients_on() -> None:
    weight = nn.Parameter(torch.eye(3))
    optimizer = Muon([weight], lr=0.02)

    def closure() -> float:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    with torch.no_grad():
        assert optimizer.step(closure) == 3.0
    assert float(weight.detach().diagonal().max()) < 1.0


def test_it_learns_a_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    wanted, weight = torch.randn(8, 5, generator=generator), nn.Parameter(torch.zeros(8, 5))
    optimizer = Muon([weight], lr=0.2)
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 0.2 * (1 - step / 200)
        optimizer.zero_grad()
        (weight - wanted).square().sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert float((weight.detach() - wanted).norm() / wanted.norm()) < 0.05


def test_only_matrices_are_taken() -> None:
    with pytest.raises(ValueError, match="2D"):
        Muon([nn.Parameter(torch.zeros(3))], lr=0.02)
