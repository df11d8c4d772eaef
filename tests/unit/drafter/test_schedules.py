"""Learning rate, noise and optimisers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from drafthouse.drafter.anchors import generator_for
from drafthouse.drafter.model import DFlashDrafter
from drafthouse.drafter.noise import NoiseSettings, add_noise, noise_level
from drafthouse.drafter.optimizers import (
    OptimizerSettings,
    build_optimizers,
    optimizer_tensors,
    restore_optimizers,
    set_rate,
)
from drafthouse.drafter.schedule import ScheduleSettings, rate_factor
from tests.unit.drafter.doubles import tiny_config


def test_cosine_rises_then_falls_to_its_end() -> None:
    settings = ScheduleSettings(warmup=0.1, final=0.2)
    factors = [rate_factor(settings, step, 100) for step in range(100)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factors[10] == 1.0
    assert factors[-1] == pytest.approx(0.2, abs=0.001)
    assert factors[55] == pytest.approx(0.6)
    assert all(b < a for a, b in itertools.pairwise(factors[10:]))


def test_wsd_is_flat_then_falls_linearly() -> None:
    settings = ScheduleSettings(kind="wsd", warmup=0.1, decay=0.2, final=0.1)
    factors = [rate_factor(settings, step, 100) for step in range(100)]
    assert set(factors[9:81]) == {1.0}
    steps = [a - b for a, b in itertools.pairwise([*factors[80:], 0.1])]
    assert steps == pytest.approx([0.9 / 20] * 20)


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_runs_have_usable_rates(kind: Any, steps: int) -> None:
    factors = [rate_factor(ScheduleSettings(kind=kind), step, steps) for step in range(steps)]
    assert all(0.0 <= f <= 1.0 for f in factors)
    assert all(f > 0 for f in factors)


def test_noise_levels() -> None:
    assert noise_level(NoiseSettings(), 0, 10) == 0.0
    constant, cosine = (NoiseSettings(kind=k, sigma=0.2) for k in ("constant", "cosine"))
    assert {noise_level(constant, s, 10) for s in range(10)} == {0.2}
    levels = [noise_level(cosine, s, 11) for s in range(11)]
    assert (levels[0], levels[5], levels[10]) == (pytest.approx(0.2), pytest.approx(0.1), pytest.approx(0.0))


def test_noise_is_relative_to_each_token_and_tap() -> None:
    taps = torch.randn(2, 40, 3, 64) * torch.tensor([0.01, 1.0, 100.0])[:, None]
    taps[0, 30:] = 0  # padding
    noisy = add_noise(taps, 0.1, generator_for(0, 0, "noise"))
    ratio = (noisy - taps)[1].square().mean((0, 2)).sqrt() / taps[1].square().mean((0, 2)).sqrt()
    assert ratio.tolist() == pytest.approx([0.1] * 3, rel=0.1)
    assert not noisy[0, 30:].any()
    assert torch.equal(noisy, add_noise(taps, 0.1, generator_for(0, 0, "noise")))
    assert add_noise(taps, 0.0, generator_for(0, 0, "noise")) is taps
    assert add_noise(taps.bfloat16(), 0.1, generator_for(0, 0, "noise")).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_optimizers_cover_every_parameter_once_and_restore_exactly(kind: Any) -> None:
    settings = OptimizerSettings(kind=kind, lr=1e-3, weight_decay=0.1)

    def step(model: DFlashDrafter, optimizers: dict[str, torch.optim.Optimizer], number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        set_rate(optimizers, 0.5)
        for optimizer in optimizers.values():
            optimizer.step()

    first = DFlashDrafter(tiny_config())
    optimizers = build_optimizers(first, settings)
    groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
    covered = [id(p) for group in groups for p in group["params"]]
    assert sorted(covered) == sorted(id(p) for p in first.parameters())
    for group in groups:
        dimensions = {p.dim() for p in group["params"]}
        assert dimensions == ({1} if group["weight_decay"] == 0 else {2})
    step(first, optimizers, 0)
    second = DFlashDrafter(tiny_config())
    second.load_state_dict(first.state_dict())
    again = build_optimizers(second, settings)
    restore_optimizers(second, again, {k: v.clone() for k, v in optimizer_tensors(first, optimizers).items()})
    step(first, optimizers, 1)
    step(second, again, 1)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_muon_rate_without_muon_is_refused() -> None:
    with pytest.raises(ValidationError, match="muon_lr is set but kind is not 'muon'"):
        OptimizerSettings(muon_lr=0.1)
