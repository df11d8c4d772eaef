"""Decoding one text at a time with CUDA graphs: a round is two replays instead of hundreds of launches.

At batch 1 a small target spends its time on launching kernels, not on computing. The tensors of a round have fixed
shapes (all slots of the caches under a mask, every node of the path under a count), so the target's pass is one graph
and commit, context and the drafter's next block are another. The text is that of `decode`; only greedy decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafthouse.decode.draft import DraftContext
from drafthouse.decode.forward import Pass, Stepper
from drafthouse.decode.generate import Generation
from drafthouse.decode.proposal import best_first
from drafthouse.decode.state import AttentionState, DeltaState, TargetState
from drafthouse.decode.topology import Topology
from drafthouse.drafter.model import DFlashDrafter
from drafthouse.errors import TargetError

WARM_UP = 3  # rounds outside of the graph: kernels are compiled and chosen


class GraphDecoder:
    """Greedy decoding of single prompts on CUDA.

    Args:
        stepper: the target.
        drafter: None: autoregressive.
        budget: drafts of a tree; None: a chain.
        capacity: longest text, prompt and answer.

    Raises:
        TargetError: the target is not on a CUDA device.
    """

    def __init__(self, stepper: Stepper, drafter: DFlashDrafter | None, budget: int | None, capacity: int) -> None:
        self.stepper, self.drafter, self.budget, self.capacity = stepper, drafter, budget, capacity
        device = stepper.target.device
        if device.type != "cuda":
            raise TargetError(
                f"CUDA graphs cannot run on {device}", where="target.device", fix="use cuda, or decode() without graphs"
            )
        depth = drafter.config.block_size - 1 if drafter is not None else 0
        self.nodes = 1 + (depth if budget is None else budget)
        self.state: TargetState = stepper.new_state(1, capacity)
        self.context = None if drafter is None else DraftContext(drafter, stepper.target, 1, capacity)
        nodes = self.nodes
        self.tokens = torch.zeros(1, nodes, dtype=torch.int64, device=device)
        self.topology = Topology.chain(1, nodes, device)
        if budget is not None:
            # Its own memory, for it differs from round to round, and no chain, whatever it is at first.
            self.topology = Topology(
                self.topology.parents.contiguous(),
                self.topology.depth.contiguous(),
                self.topology.visible.contiguous(),
            )
        self.path = torch.zeros(1, nodes, dtype=torch.int64, device=device)
        self.counts = torch.ones(1, dtype=torch.int64, device=device)
        self.bonus = torch.zeros(1, dtype=torch.int64, device=device)
        self._verify: tuple[Any, tuple[Pass, Tensor]] | None = None
        self._advance: tuple[Any, Any] | None = None

    @torch.no_grad()
    def decode(self, prompt: np.ndarray, max_new_tokens: int) -> Generation:
        """The continuation of `prompt` (token ids `[length]`)."""
        device, eos = self.stepper.target.device, set(self.stepper.target.eos_ids)
        offer = self._begin(torch.from_numpy(prompt.astype(np.int64)).to(device)[None])
        out = Generation(tokens=[int(self.bonus)])
        while out.tokens[-1] not in eos and len(out.tokens) < max_new_tokens:
            tokens, parents = self._offered(out.tokens[-1], offer)
            draws = self._run_verify().tolist()
            path = _walk(tokens, parents, draws[0])
            room = max_new_tokens - len(out.tokens)
            emitted = [draws[0][node] for node in path][:room]
            ends = [place for place, token in enumerate(emitted) if token in eos]
            emitted = emitted[: ends[0] + 1] if ends else emitted
            out.tokens += emitted
            out.rounds.append(len(emitted))
            out.drafted.append(min(len(path) - 1, len(emitted)))
            kept = path[:room]
            self._put(self.path, kept + [0] * (self.nodes - len(kept)))
            self._put(self.counts, [len(kept)])
            self._put(self.bonus, [emitted[-1]])
            offer = self._run_advance()
        return out

    def _begin(self, tokens: Tensor) -> Any:
        """Prefill into the fixed memory; the first token and the first offer."""
        length = torch.tensor([tokens.shape[1]], device=tokens.device)
        fresh = self.stepper.new_state(1, self.capacity)
        hidden, taps = self.stepper.prefill(fresh, tokens, length)
        _copy(self.state, fresh)
        self.bonus.copy_(self.stepper.logits(hidden).argmax(-1))
        if self.context is None:
            return None
        self.context.lengths.zero_()
        grown = self.context.lengths
        self.context.extend(taps, torch.arange(tokens.shape[1], device=tokens.device)[None], length)
        grown.copy_(self.context.lengths)
        self.context.lengths = grown
        return self._offer()

    def _offer(self) -> Any:
        assert self.context is not None
        log_probs = self.context.propose(self.bonus, self.capacity)
        if self.budget is None:
            return log_probs.argmax(-1)
        return log_probs.topk(min(self.budget, log_probs.shape[-1]), dim=-1)

    def _offered(self, last: int, offer: Any) -> tuple[list[int], list[int]]:
        """The tokens and parents of the next pass, also put where the graph reads them."""
        if self.context is None:
            tokens, parents = [last], [-1]
        elif self.budget is None:
            tokens = [last, *offer[0].tolist()]
            parents = list(range(-1, len(tokens) - 1))
        else:
            top, ids = offer.values[0].double().cpu().numpy(), offer.indices[0].cpu().numpy()
            chosen = best_first(top, self.budget)
            tokens = [last, *(int(ids[level, rank]) for _, level, rank in chosen)]
            parents = [-1, *(parent for parent, _, _ in chosen)]
            # A tree that the vocabulary cannot fill is filled with roots that nothing leads to.
            tokens += [0] * (self.nodes - len(tokens))
            parents += [-1] * (self.nodes - len(parents))
            made = Topology.forest(torch.tensor([parents]))
            for own, new in zip(_parts(self.topology), _parts(made), strict=True):
                own.copy_(new)
        self._put(self.tokens, tokens)
        return tokens, parents

    def _run_verify(self) -> Tensor:
        def work() -> tuple[Pass, Tensor]:
            passed = self.stepper.forward(self.state, self.tokens, self.topology, self.capacity)
            return passed, self.stepper.logits(passed.hidden).argmax(-1)

        if self._verify is None:
            self._verify = _captured(work)
        graph, (_, draws) = self._verify
        graph.replay()
        return draws

    def _run_advance(self) -> Any:
        def work() -> Any:
            assert self._verify is not None
            passed = self._verify[1][0]
            state = TargetState([replace(layer) for layer in self.state.layers], self.state.lengths, self.capacity)
            self.stepper.commit(state, passed, self.path, self.counts)
            _copy(self.state, state)
            if self.context is None:
                return None
            lengths = self.context.lengths
            self.context.extend(passed.taps, self.path, self.counts, self.nodes)
            lengths.copy_(self.context.lengths)
            self.context.lengths = lengths
            return self._offer()

        if self._advance is None:
            # Warming up and capturing would commit the path several times: the memory is put back in between.
            kept = [tensor.clone() for tensor in self._memory()]

            def put_back() -> None:
                for tensor, before in zip(self._memory(), kept, strict=True):
                    tensor.copy_(before)

            self._advance = _captured(work, put_back)
        graph, offer = self._advance
        graph.replay()
        return offer

    def _memory(self) -> list[Tensor]:
        tensors = _tensors(self.state)
        if self.context is not None:
            tensors += [tensor for pair in self.context.layers for tensor in pair] + [self.context.lengths]
        return tensors

    def _put(self, tensor: Tensor, values: list[int]) -> None:
        tensor.copy_(torch.tensor(values, dtype=tensor.dtype).view(tensor.shape))


def _captured(work: Callable[[], Any], put_back: Callable[[], None] | None = None) -> tuple[Any, Any]:
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            work()
            if put_back is not None:
                put_back()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


def _parts(topology: Topology) -> tuple[Tensor, Tensor, Tensor]:
    return topology.parents, topology.depth, topology.visible


def _tensors(state: TargetState) -> list[Tensor]:
    found: list[Tensor] = [state.lengths]
    for layer in state.layers:
        if isinstance(layer, DeltaState):
            found += [layer.window, layer.recurrent]
        else:
            assert isinstance(layer, AttentionState)
            found += [layer.key, layer.value]
    return found


def _copy(into: TargetState, source: TargetState) -> None:
    for own, new in zip(_tensors(into), _tensors(source), strict=True):
        if own is not new:
            own.copy_(new)


def _walk(tokens: list[int], parents: list[int], draws: list[int]) -> list[int]:
    """Nodes on the accepted path, root first."""
    path = [0]
    while True:
        here = path[-1]
        child = next((i for i in range(here + 1, len(tokens)) if parents[i] == here and tokens[i] == draws[here]), None)
        if child is None:
            return path
        path.append(child)
