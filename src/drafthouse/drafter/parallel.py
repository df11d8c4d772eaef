"""One run over several processes, as torchrun starts them: replicated (DDP) or sharded (FSDP2).

Every rank reads its own rows of the step. Loss and gradient are sums over all ranks divided by the sum of all weights,
so that ranks with unlike numbers of labels weigh as they should, and a run of one process with twice the rows takes the
same step as two processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

Parallel = Literal["ddp", "fsdp"]


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes files."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether any rank says so; all ranks get the same answer."""
        if self.world == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=device)))

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.world > 1:
            dist.barrier()


@contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """The ranks of the environment that torchrun sets; alone where there is none.

    A process group that the caller opened is used and stays open.
    """
    if dist.is_available() and dist.is_initialized():
        yield Ranks(dist.get_rank(), dist.get_world_size())
        return
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks()
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), world)
    finally:
        dist.destroy_process_group()


class Spread:
    """A model as the ranks hold it: call it for a forward pass whose gradients are averaged over the ranks."""

    def __init__(self, model: nn.Module, ranks: Ranks, how: Parallel, *, bf16: bool) -> None:
        self.model, self.ranks = model, ranks
        self.sharded = ranks.world > 1 and how == "fsdp"
        self._call: nn.Module = model
        if self.sharded:
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
            # One unit: every layer's keys and values of the context are computed outside of its own forward pass, so
            # a layer cannot be gathered by itself. What weighs, fp32 weights, gradients and Adam's moments, is sharded.
            fully_shard(model, mp_policy=policy)
        elif ranks.world > 1:
            device = next(model.parameters()).device
            self._call = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)

    def __call__(self, *arguments: Any) -> Tensor:
        return cast(Tensor, self._call(*arguments))

    def syncing(self, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch: only the last of a step exchanges gradients."""
        if self.sharded:
            cast(Any, self.model).set_requires_gradient_sync(last)
        elif self.ranks.world > 1 and not last:
            return cast(DistributedDataParallel, self._call).no_sync()
        return nullcontext()

    def plain_weights(self) -> dict[str, Tensor]:
        """Whole parameters by name; every rank must ask."""
        return {name: whole(tensor) for name, tensor in self.model.state_dict().items()}


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered (every rank must ask), any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """`value`, a whole tensor, on the device of `parameter` and sharded as it is."""
    value = value.to(parameter.device)
    if isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value
