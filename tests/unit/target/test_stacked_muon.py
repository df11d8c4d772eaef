"""Stacked Muon takes the steps that Muon takes on each matrix alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drafthouse.muon import Muon
from drafthouse.target.stacked_muon import StackedMuon, orthogonalised

SHAPES = [(12, 8), (8, 12), (8, 8), (12, 8), (8, 12), (2, 8)]


def matrices(seed: int) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]


def test_it_takes_the_steps_of_muon() -> None:
    ours, theirs = matrices(0), matrices(0)
    stacked, plain = StackedMuon(ours, lr=0.03), Muon(theirs, lr=0.03)
    for step in range(4):
        for mine, its, gradient in zip(ours, theirs, matrices(step + 1), strict=True):
            mine.grad, its.grad = gradient.detach().clone(), gradient.detach().clone()
        stacked.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.03 / (step + 1)
        stacked.step()
        plain.step()
    for mine, its, before in zip(ours, theirs, matrices(0), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
        assert float((mine - before).detach().abs().max()) > 1e-3


@pytest.mark.parametrize("shape", [(3, 8, 20), (3, 20, 8)])
def test_singular_values_come_near_one(shape: tuple[int, int, int]) -> None:
    values = torch.linalg.svdvals(orthogonalised(torch.randn(shape, generator=torch.Generator().manual_seed(0))))
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.3
