"""The Triton kernels of the delta rule against one state a node in float64, at the head shapes of Qwen3.6-27B.

Under Triton's interpreter the same tests run on the CPU with fewer and smaller heads.

Tolerance: the norm of the error over the norm of the result. Float32 leaves about 3e-7 here and products of three
tf32 pieces no more than 2e-6; plain tf32 would leave 3e-4, a wrong parent or an unwritten element far more.
"""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from torch import Tensor

from drafthouse.decode import gdn
from drafthouse.decode.topology import Topology
from tests.gpu.conftest import INTERPRETED

CLOSE = 5e-6
KEY_HEADS, HEADS, DIM = (2, 4, 32) if INTERPRETED else (16, 48, 128)
LENGTHS = (1, 5, 16, 17, 33, 65, 129)


def drawn(
    device: torch.device,
    seed: int,
    rows: int,
    length: int,
    *,
    key_heads: int = KEY_HEADS,
    heads: int = HEADS,
    key_dim: int = DIM,
    value_dim: int = DIM,
    scale_g: float = 0.3,
) -> tuple[gdn.DeltaInputs, Tensor]:
    """Inputs as a layer makes them, in float32."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=generator, device=device)

    inputs = gdn.DeltaInputs(
        query=torch.nn.functional.normalize(normal(length, key_heads, key_dim), dim=-1) * key_dim**-0.5,
        key=torch.nn.functional.normalize(normal(length, key_heads, key_dim), dim=-1),
        value=normal(length, heads, value_dim),
        g=-scale_g * normal(length, heads).abs(),
        beta=normal(length, heads).sigmoid(),
    )
    return inputs, normal(heads, key_dim, value_dim)


def forest(device: torch.device, seed: int, rows: int, length: int) -> Topology:
    """Random parents, roots among them."""
    generator = torch.Generator().manual_seed(seed)
    parents = [[int(torch.randint(-1, max(i, 1), (1,), generator=generator)) if i else -1 for i in range(length)]]
    others = [[-1, *(max(i - 1 - (i + row) % 3, -1) for i in range(1, length))] for row in range(1, rows)]
    return Topology.forest(torch.tensor(parents + others, device=device))


def double(inputs: gdn.DeltaInputs) -> gdn.DeltaInputs:
    return gdn.DeltaInputs(**{name: x.double() for name, x in vars(inputs).items()})


def off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.fixture
def triton_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The PyTorch forms are out of reach: what passes has run in the kernels."""

    def unreachable(*_: object) -> None:
        raise AssertionError("fell back to PyTorch")

    monkeypatch.setattr(gdn, "chunk_form", unreachable)
    monkeypatch.setattr(gdn, "step_by_step", unreachable)


@pytest.mark.usefixtures("triton_only")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shape", ["forest", "chain"])
def test_outputs_and_updates_are_those_of_a_state_a_node(device: torch.device, length: int, shape: str) -> None:
    inputs, state = drawn(device, length, 2, length)
    topology = forest(device, length, 2, length) if shape == "forest" else Topology.chain(2, length, device)
    output, updates = gdn.forest_forward(inputs, state, topology)
    assert off(output, gdn.per_node(double(inputs), state.double(), topology)) < CLOSE
    leaf = torch.tensor([length - 1, length // 2], device=device)
    folded = gdn.fold(inputs, updates, state, topology, leaf)
    paths = [torch.nonzero(topology.visible[row, leaf[row]]).flatten().tolist() for row in range(2)]
    longest = max(map(len, paths))
    path = torch.tensor([nodes + [0] * (longest - len(nodes)) for nodes in paths], device=device)
    counts = torch.tensor([len(nodes) for nodes in paths], device=device)
    replayed = gdn.replay(inputs, state, path, counts)
    exact = state.double()
    for row, nodes in enumerate(paths):
        alone = Topology.chain(1, len(nodes), device)
        one = gdn.DeltaInputs(**{name: x[row : row + 1, nodes].double() for name, x in vars(inputs).items()})
        _, path_updates = _exact_chunk(one, exact[row : row + 1], alone)
        expected = gdn.fold(one, path_updates, exact[row : row + 1], alone, torch.tensor([len(nodes) - 1]).to(device))
        assert off(folded[row], expected[0]) < CLOSE
        assert off(replayed[row], expected[0]) < CLOSE


# Bound before any fixture hides it.
_exact_chunk = gdn.chunk_form


@pytest.mark.usefixtures("triton_only")
@pytest.mark.parametrize(
    ("key_heads", "heads", "key_dim", "value_dim"), [(2, 2, 16, 32), (1, 4, 64, 16), (3, 6, 32, 64)]
)
def test_other_head_shapes(device: torch.device, key_heads: int, heads: int, key_dim: int, value_dim: int) -> None:
    inputs, state = drawn(device, 3, 3, 20, key_heads=key_heads, heads=heads, key_dim=key_dim, value_dim=value_dim)
    topology = forest(device, 3, 3, 20)
    output, _ = gdn.forest_forward(inputs, state, topology)
    assert off(output, gdn.per_node(double(inputs), state.double(), topology)) < CLOSE


@pytest.mark.usefixtures("triton_only")
@pytest.mark.parametrize("length", [1, 17, 65])
@pytest.mark.parametrize("nodes", [16, 32, 64])
def test_every_way_to_cut_the_work_gives_the_same(device: torch.device, length: int, nodes: int) -> None:
    kernels = importlib.import_module("drafthouse.decode.gdn_triton")
    tiling = kernels.Tiling(nodes=nodes, values=16, prepare_warps=4)
    inputs, state = drawn(device, length, 2, length)
    topology = forest(device, length, 2, length)
    output, updates = kernels.forest_forward(inputs, state, topology, tiling)
    assert off(output, gdn.per_node(double(inputs), state.double(), topology)) < CLOSE
    assert off(updates, _exact_chunk(double(inputs), state.double(), topology)[1]) < CLOSE


@pytest.mark.usefixtures("triton_only")
def test_repeated_keys_do_not_cancel(device: torch.device) -> None:
    """All keys alike and every beta near one: powers of the system's matrix grow far beyond its inverse."""
    inputs, state = drawn(device, 5, 1, 65, scale_g=0.001)
    same = dataclasses.replace(
        inputs, key=inputs.key[:, :1].expand_as(inputs.key), beta=torch.full_like(inputs.beta, 0.999)
    )
    topology = Topology.chain(1, 65, device)
    output, _ = gdn.forest_forward(same, state, topology)
    assert off(output, gdn.per_node(double(same), state.double(), topology)) < 10 * CLOSE


@pytest.mark.usefixtures("triton_only")
def test_strong_decay_neither_overflows_nor_gives_nan(device: torch.device) -> None:
    inputs, state = drawn(device, 6, 1, 40)
    g = inputs.g.clone()
    g[:, 1::3] = -500.0
    inputs = dataclasses.replace(inputs, g=g)
    topology = forest(device, 6, 1, 40)
    output, updates = gdn.forest_forward(inputs, state, topology)
    assert bool(output.isfinite().all() & updates.isfinite().all())
    assert off(output, gdn.per_node(double(inputs), state.double(), topology)) < CLOSE


@pytest.mark.usefixtures("triton_only")
def test_branches_do_not_see_each_other(device: torch.device) -> None:
    inputs, state = drawn(device, 7, 1, 35)
    parents = torch.tensor([[-1, 0, *(1 + i % 2 if i < 2 else i for i in range(33))]], device=device)
    topology = Topology.forest(parents)
    output, updates = gdn.forest_forward(inputs, state, topology)
    value = inputs.value.clone()
    value[0, 4] += 100.0
    again, updates_again = gdn.forest_forward(dataclasses.replace(inputs, value=value), state, topology)
    blind = ~topology.visible[0, :, 4]
    assert bool(blind.any())
    assert not bool(blind.all())
    assert torch.equal(again[0, blind], output[0, blind])
    assert torch.equal(updates_again[0, :, blind], updates[0, :, blind])
    assert not torch.allclose(again[0, ~blind], output[0, ~blind], atol=1.0)


@pytest.mark.usefixtures("triton_only")
def test_inputs_need_not_be_contiguous_and_the_state_is_only_read(device: torch.device) -> None:
    inputs, state = drawn(device, 8, 2, 17)
    wide = torch.cat([inputs.value, inputs.value], dim=-1)[..., :DIM]
    strided = dataclasses.replace(inputs, value=wide, g=inputs.g.transpose(1, 2).contiguous().transpose(1, 2))
    topology, before = forest(device, 8, 2, 17), state.clone()
    expected, _ = gdn.forest_forward(inputs, state, topology)
    found, _ = gdn.forest_forward(strided, state, topology)
    assert torch.equal(found, expected)
    path = torch.zeros(2, 1, dtype=torch.int64, device=device)
    nothing = gdn.replay(strided, state, path, torch.zeros(2, dtype=torch.int64, device=device))
    assert torch.equal(nothing, state)
    assert torch.equal(state, before)


@pytest.mark.skipif(INTERPRETED, reason="a CUDA graph needs a device")
@pytest.mark.usefixtures("triton_only")
def test_a_cuda_graph_holds_verification_and_commit(device: torch.device) -> None:
    inputs, state = drawn(device, 9, 1, 17)
    topology = forest(device, 9, 1, 17)
    path = torch.arange(4, device=device).unsqueeze(0)
    counts = torch.tensor([2], device=device)
    expected = [gdn.replay(inputs, state, path, torch.tensor([n], device=device)) for n in (2, 4)]
    first, _ = gdn.forest_forward(inputs, state, topology)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, _ = gdn.forest_forward(inputs, state, topology)
        after = gdn.replay(inputs, state, path, counts)
    for n, wanted in zip((2, 4), expected, strict=True):
        counts.fill_(n)  # the graph reads how many were accepted, it does not bake it in
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(output, first)
        assert torch.equal(after, wanted)


def test_what_the_kernels_do_not_take_runs_in_pytorch(device: torch.device) -> None:
    odd, odd_state = drawn(device, 10, 1, 9, key_heads=1, heads=2, key_dim=12, value_dim=20)
    topology = forest(device, 10, 1, 9)
    output, _ = gdn.forest_forward(odd, odd_state, topology)
    assert off(output, gdn.per_node(double(odd), odd_state.double(), topology)) < CLOSE
    inputs, state = drawn(device, 11, 1, 9)
    exact, _ = gdn.forest_forward(double(inputs), state.double(), topology)
    assert exact.dtype == torch.float64
    assert off(exact, gdn.per_node(double(inputs), state.double(), topology)) < 1e-12
