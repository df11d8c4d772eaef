"""Verification of a draft tree by the Gated DeltaNet layers of Qwen3.6-27B on one GPU: our kernels, and the others'.

Random inputs at batch 1 (16 key heads, 48 value heads, 128 by 128 float32 states, 48 layers), each layer with its
own tensors, so that no state stays in the L2 cache. Contenders, all timed in turns as replays of CUDA graphs:

- ours: the ancestor-masked chunk form in Triton; commit by replay of the accepted path. It is raced as it ships
  (`Tiling.of`); other ways to cut its work are timed beside it, so that a better one is seen.
- PyTorch: the same form in PyTorch operations.
- per-node: one state a node, as SGLang 0.5.23 verifies trees: a program walks the nodes, loads the parent's state
  from the snapshots and stores its own; commit copies the accepted snapshot. In its layout (key dimension last),
  at the fastest of several launch configurations.

python benchmarks/tree_verify.py                  # leaves benchmarks/results/tree_verify.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from rows import Rows

from drafthouse.decode import gdn, gdn_triton
from drafthouse.decode.gdn_triton import Tiling
from drafthouse.decode.proposal import tree
from drafthouse.decode.topology import Topology

SEED = 0
LAYERS, KEY_HEADS, HEADS, DIM = 48, 16, 48, 128
STATE_BYTES = HEADS * DIM * DIM * 4
BARRED = 65  # nodes of a tree of the usual budget, 64: the length that the bar is for, and that cuts are tried at
BLOCK = 15  # positions that a drafter of block size 16 predicts
ACCEPTED = 8  # nodes of a typical accepted path, the root included
CUTS = [
    Tiling(nodes=nodes, values=values, prepare_warps=prepare, apply_warps=apply)
    for nodes, values, prepare, apply in (
        (16, 16, 1, 2),
        (16, 16, 1, 4),
        (16, 32, 1, 2),
        (16, 32, 1, 8),
        (16, 32, 2, 4),
        (16, 32, 4, 4),
        (16, 64, 1, 4),
        (16, 64, 1, 8),
        (32, 32, 1, 4),
        (32, 32, 2, 4),
        (32, 32, 4, 4),
        (32, 64, 2, 8),
    )
]
CONFIGURATIONS = ((4, 1), (8, 1), (16, 1), (16, 2), (32, 4))  # columns of a program, warps


@triton.jit
def _per_node(
    query, key, value, g, beta, parents, state, snapshots, output, length,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Grid (DIM / VALUES, HEADS); state `[heads, value_dim, key_dim]`, snapshots `[T, heads, value_dim, key_dim]`."""
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    dims, columns = tl.arange(0, DIM), tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    at = (head * DIM + columns[:, None]) * DIM + dims[None, :]
    for node in range(length):
        parent = tl.load(parents + node)
        before = snapshots + parent * (HEADS * DIM * DIM)
        if parent < 0:
            before = state
        memory = tl.load(before + at)
        keys = tl.load(key + (node * KEY_HEADS + key_head) * DIM + dims)
        queries = tl.load(query + (node * KEY_HEADS + key_head) * DIM + dims)
        values = tl.load(value + (node * HEADS + head) * DIM + columns)
        memory *= tl.exp(tl.load(g + node * HEADS + head))
        values = (values - tl.sum(memory * keys[None, :], axis=1)) * tl.load(beta + node * HEADS + head)
        memory += values[:, None] * keys[None, :]
        tl.store(output + (node * HEADS + head) * DIM + columns, tl.sum(memory * queries[None, :], axis=1))
        tl.store(snapshots + node.to(tl.int64) * (HEADS * DIM * DIM) + at, memory)


@dataclass(frozen=True)
class Layer:
    """One layer's inputs and its state in both layouts: `[1, heads, key, value]` and `[heads, value, key]`."""

    inputs: gdn.DeltaInputs
    state: Tensor
    turned: Tensor


@dataclass(frozen=True)
class Timing:
    """Microseconds of one replay: median, 10th and 90th percentile."""

    median: float
    low: float
    high: float


def layers(length: int, generator: torch.Generator) -> list[Layer]:
    """Inputs as a layer makes them: unit keys, scaled unit queries, decays in (0, 1), beta in (0, 1)."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator, device="cuda")

    made = []
    for _ in range(LAYERS):
        inputs = gdn.DeltaInputs(
            query=torch.nn.functional.normalize(normal(length, KEY_HEADS, DIM), dim=-1) * DIM**-0.5,
            key=torch.nn.functional.normalize(normal(length, KEY_HEADS, DIM), dim=-1),
            value=normal(length, HEADS, DIM),
            g=-0.1 * normal(length, HEADS).abs(),
            beta=normal(length, HEADS).sigmoid(),
        )
        state = normal(HEADS, DIM, DIM)
        made.append(Layer(inputs, state, state[0].transpose(-1, -2).contiguous()))
    return made


def walk_nodes(layer: Layer, topology: Topology, snapshots: Tensor, values: int, warps: int) -> Tensor:
    """The per-node form on one layer: outputs `[1, T, heads, value_dim]`; snapshots are written."""
    inputs = layer.inputs
    output = torch.empty_like(inputs.value)
    _per_node[(DIM // values, HEADS)](
        inputs.query, inputs.key, inputs.value, inputs.g, inputs.beta, topology.parents, layer.turned, snapshots,
        output, topology.length, HEADS=HEADS, KEY_HEADS=KEY_HEADS, DIM=DIM, VALUES=values, num_warps=warps,
    )  # fmt: skip
    return output


def graph(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The work as a CUDA graph, after a run that compiles what it needs."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        work()
    return captured


def timed(repeats: int, works: Sequence[Callable[[], object]]) -> list[Timing]:
    """Replays of each work's graph, in turns, so that a change of clocks meets all of them."""
    graphs = [graph(work) for work in works]
    taken: list[list[float]] = [[] for _ in works]
    for turn in range(repeats + 3):
        for captured, times in zip(graphs, taken, strict=True):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            captured.replay()
            ended.record()
            ended.synchronize()
            if turn >= 3:  # the first turns warm the clocks up
                times.append(began.elapsed_time(ended) * 1e3)
    cuts = torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64)
    return [Timing(*torch.tensor(times, dtype=torch.float64).quantile(cuts).tolist()) for times in taken]


def kernels(work: Callable[[], object]) -> dict[str, float]:
    """Microseconds of one call of each of our kernels by torch's profiler, eagerly launched: which one is slow."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    ours = [event for event in profile.key_averages() if event.key in {"_prepare", "_apply"}]
    return {event.key: round(event.device_time_total / event.count, 2) for event in ours}


def bandwidth(repeats: int) -> float:
    """Bytes/s of a pass over device memory, reads and writes counted."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    (scaled,) = timed(repeats, [lambda: torch.mul(source, 2.0, out=target)])
    return 2 * source.nbytes / (scaled.median * 1e-6)


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the error over the norm of the expected."""
    return float((found.double() - expected).norm() / expected.norm())


def check(layer: Layer, topology: Topology, snapshots: Tensor) -> tuple[float, float]:
    """Errors of ours and of the per-node form against float64; contenders that compute other things do not race."""
    exact = gdn.DeltaInputs(**{name: x.double() for name, x in vars(layer.inputs).items()})
    expected = gdn.per_node(exact, layer.state.double(), topology)
    ours = relative(gdn_triton.forest_forward(layer.inputs, layer.state, topology)[0], expected)
    ways = CUTS if topology.length == BARRED else []
    cuts = [relative(gdn_triton.forest_forward(layer.inputs, layer.state, topology, cut)[0], expected) for cut in ways]
    peers = [relative(walk_nodes(layer, topology, snapshots, *chosen), expected) for chosen in CONFIGURATIONS]
    library = relative(gdn.chunk_form(layer.inputs, layer.state, topology)[0], expected)
    named = [("ours", ours), *(("a cut", error) for error in cuts), *(("per-node", error) for error in peers)]
    for name, error in (*named, ("PyTorch", library)):
        if not error < 1e-4:  # also for NaN
            raise SystemExit(f"{name} is off by {error:.2e} at T={topology.length}: nothing was timed")
    return ours, max(peers)


def verification(rows: Rows, length: int, repeats: int, bytes_per_second: float) -> None:
    """One tree of `length` nodes through 48 layers, and the commit of an accepted path."""
    generator = torch.Generator("cuda").manual_seed(SEED + length)
    log_probs = (3 * torch.randn(1, BLOCK, 1000, generator=generator, device="cuda")).log_softmax(-1)
    topology = tree(torch.zeros(1, dtype=torch.int64, device="cuda"), log_probs, length - 1).topology
    model = layers(length, generator)
    snapshots = torch.empty(LAYERS, length, HEADS, DIM, DIM, device="cuda")
    ours_error, peer_error = check(model[0], topology, snapshots[0])
    # The spine comes first in a tree: node i of it has depth i.
    path = torch.arange(BLOCK + 1, device="cuda").unsqueeze(0)
    counts = torch.full((1,), ACCEPTED, device="cuda")
    leaf = torch.full((1,), ACCEPTED - 1, device="cuda")

    def per_node(values: int, warps: int) -> Callable[[], object]:
        return lambda: [
            walk_nodes(layer, topology, kept, values, warps) for layer, kept in zip(model, snapshots, strict=True)
        ]

    tried = timed(max(repeats // 5, 3), [per_node(*chosen) for chosen in CONFIGURATIONS])
    best = min(range(len(tried)), key=lambda index: tried[index].median)
    columns, warps = CONFIGURATIONS[best]

    def cut(tiling: Tiling) -> Callable[[], object]:
        return lambda: [gdn_triton.forest_forward(layer.inputs, layer.state, topology, tiling) for layer in model]

    ways = [Tiling.of(length), *(CUTS if length == BARRED else ())]
    cuts = timed(max(repeats // 5, 3), [cut(tiling) for tiling in ways])
    for tiling, took in sorted(zip(ways, cuts, strict=True), key=lambda pair: pair[1].median):
        rows.add(
            f"tree verify: T={length}, cut as {tiling}",
            took.median / LAYERS,
            "us/layer",
            peer="cut as shipped",
            ratio=cuts[0].median / took.median,
            details={"tiling": vars(tiling), "kernels_us": kernels(cut(tiling))},
        )
    peer_name = f"a state a node (Triton, {columns} columns, {warps} warps)"
    ours, peer, library, ours_commit, peer_commit = timed(
        repeats,
        [
            lambda: [gdn_triton.forest_forward(layer.inputs, layer.state, topology) for layer in model],
            per_node(columns, warps),
            lambda: [gdn.chunk_form(layer.inputs, layer.state, topology) for layer in model],
            lambda: [gdn_triton.replay(layer.inputs, layer.state, path, counts) for layer in model],
            lambda: [
                torch.index_select(kept, 0, leaf, out=layer.turned.unsqueeze(0))
                for layer, kept in zip(model, snapshots, strict=True)
            ],
        ],
    )

    def add(
        what: str,
        took: Timing,
        per: int,
        unit: str,
        *,
        peer: str,
        ratio: float,
        bar: float | None = None,
    ) -> None:
        spread = f"{unit} (p10 {took.low / per:.4g}, p90 {took.high / per:.4g})"
        rows.add(f"tree verify: T={length}, {what}", took.median / per, spread, peer=peer, ratio=ratio, bar=bar)

    bar = 3.0 if length == BARRED else None
    ratio = peer.median / ours.median
    add("ours", ours, LAYERS, "us/layer", peer=peer_name, ratio=ratio, bar=bar)
    add("ours", ours, LAYERS, "us/layer", peer="the same form in PyTorch", ratio=library.median / ours.median)
    add("ours, 48 layers", ours, 1000, "ms/step", peer=peer_name, ratio=ratio)
    add("a state a node", peer, LAYERS, "us/layer", peer="ours", ratio=1 / ratio)
    add("PyTorch", library, LAYERS, "us/layer", peer=peer_name, ratio=peer.median / library.median)
    commit = peer_commit.median / ours_commit.median
    add(f"commit of {ACCEPTED} nodes, ours", ours_commit, LAYERS, "us/layer", peer="copy of a snapshot", ratio=commit)
    both, peer_both = ours.median + ours_commit.median, peer.median + peer_commit.median
    rows.add(
        f"tree verify: T={length}, verify and commit, 48 layers",
        both / 1000,
        "ms/step",
        peer=peer_name,
        ratio=peer_both / both,
    )
    # What must pass through device memory: the state once, inputs and outputs of the nodes once. A parent's
    # snapshot may still lie in the L2 cache, so that only the writing of the snapshots is sure to be paid.
    per_node_bytes = 4 * (2 * KEY_HEADS * DIM + 3 * HEADS * DIM + 2 * HEADS)
    bound = (STATE_BYTES + length * per_node_bytes) / bytes_per_second * 1e6
    peer_bound = (1 + length) * STATE_BYTES / bytes_per_second * 1e6
    rows.add(
        f"tree verify: T={length}, memory bound", bound, "us/layer", peer="ours", ratio=ours.median / LAYERS / bound
    )
    rows.add(
        f"tree verify: T={length}, memory bound of a state a node",
        peer_bound,
        "us/layer",
        peer=peer_name,
        ratio=peer.median / LAYERS / peer_bound,
    )
    rows.add(
        f"tree verify: T={length}, error against float64",
        ours_error * 1e6,
        "1e-6, relative",
        peer="a state a node in float32",
        ratio=peer_error / ours_error,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50, help="timed replays of each contender")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "tree_verify.json")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("tree_verify.py needs a CUDA device: run it on the machine that has one")
    rows = Rows(SEED)
    with torch.no_grad():
        bytes_per_second = bandwidth(chosen.repeats)
        rows.add(
            "device memory: scaled copy",
            bytes_per_second / 1e12,
            "TB/s",
            peer="datasheet of the H200",
            ratio=bytes_per_second / 4.8e12,
        )
        for length in (17, 33, 65):
            verification(rows, length, chosen.repeats, bytes_per_second)
    rows.write(chosen.out)


if __name__ == "__main__":
    main()
