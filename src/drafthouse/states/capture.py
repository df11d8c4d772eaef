"""From samples to packed states: batches of similar length, one buffer, one copy to the host for each
batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafthouse.errors import StatesError
from drafthouse.memory import fits
from drafthouse.states.elements import decoded, quantise, token_bytes, views
from drafthouse.states.protocols import Taps
from drafthouse.states.settings import ExtractSettings
from drafthouse.states.shard import ShardSample
from drafthouse.states.spec import StatesSpec

_DTYPE = torch.bfloat16
_FLAGS = 2  # bytes behind the states: all finite, none zero
_FINEST = 8  # tokens: rows times length stays a multiple of what matrix units take


@dataclass(frozen=True)
class Batch:
    """Samples of a shard that are captured together, padded to `length` tokens."""

    samples: tuple[int, ...]
    length: int


def plan(lengths: Sequence[int], settings: ExtractSettings) -> list[Batch]:
    """Group samples by length, the longest first: little padding, and too large a batch fails at once.

    Batches of short samples are padded more finely than to `pad_multiple`: to a multiple of an eighth to a quarter of
    their length, since padding costs as much as tokens do.

    Args:
        lengths: tokens of each sample of a shard.

    Returns:
        Batches of at most `rows` rows and `batch_tokens` padded tokens; each sample is in one of them.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches = []
    first = 0
    while first < len(order):
        longest = lengths[order[first]]
        multiple = min(settings.pad_multiple, max(_FINEST, 1 << max(0, longest.bit_length() - 3)))
        padded = -(-longest // multiple) * multiple
        length = min(padded, max(longest, settings.max_tokens))
        rows = max(1, min(settings.rows, settings.batch_tokens // length))
        batches.append(Batch(tuple(order[first : first + rows]), length))
        first += rows
    return batches


class Captured:
    """The packed states of one batch, on their way to the host.

    Attributes:
        samples: indices into the shard; their tokens follow each other in this order.
        tokens: N, the valid tokens of the batch.
    """

    def __init__(
        self,
        spec: StatesSpec,
        shard: Sequence[ShardSample],
        samples: tuple[int, ...],
        states: Tensor,
        ready: torch.cuda.Event | None,
    ) -> None:
        self.samples = samples
        self.tokens = sum(len(shard[i].input_ids) for i in samples)
        self._spec = spec
        self._shard = shard
        self._states = states
        self._ready = ready

    def wait(self, where: str) -> tuple[Tensor, ...]:
        """The states on the host, contiguous, as `elements` has them: `[N, K, H]` and `[N, H]`, of fp8 their scales.

        Raises:
            StatesError: a state that is not finite, a state that is zero, or equal states of different texts;
                it names the layer and the sample.
        """
        if self._ready is not None:
            self._ready.synchronize()
        finite, filled = (bool(flag) for flag in self._states[-_FLAGS:].tolist())
        parts = views(self._states, self._spec, self.tokens)
        if not finite:
            self._blame(parts, where, "is not finite (NaN or infinity)", lambda peak: ~torch.isfinite(peak))
        if not filled:
            self._blame(parts, where, "is all zeros", lambda peak: peak == 0)
        self._check_distinct(parts, where)
        return parts

    def _slots(self, hidden: Tensor, last: Tensor) -> list[tuple[str, Tensor]]:
        """`[N, …]` of every captured layer, by what it is called."""
        slots = [(f"layer {layer}", hidden[:, slot]) for slot, layer in enumerate(self._spec.layer_ids)]
        return [*slots, (f"layer {self._spec.num_layers - 1} before the final norm", last)]

    def _blame(self, parts: tuple[Tensor, ...], where: str, what: str, bad: Callable[[Tensor], Tensor]) -> None:
        for name, states in self._slots(*decoded(parts)):
            wrong = bad(states.abs().amax(dim=-1)).nonzero()
            if len(wrong):
                token = int(wrong[0])
                for sample in self.samples:
                    length = len(self._shard[sample].input_ids)
                    if token < length:
                        raise StatesError(
                            f"the state of {name} {what} at token {token} of sample '{self._shard[sample].id}'",
                            where=where,
                            fix="check the target's weights, its kernels and the captured layers",
                        )
                    token -= length

    def _check_distinct(self, parts: tuple[Tensor, ...], where: str) -> None:
        """Different tokens must have different states: a hook that fires once, or a buffer that is not
        filled, repeats them.

        The ends of the samples are compared, which costs nothing. A shallow layer that forgets fast may
        truly give two texts with one ending one end state (as it is kept); only rows that agree also where their
        tokens differ are wrong, since a layer's output carries the token's own embedding.
        """
        ends = np.cumsum([len(self._shard[i].input_ids) for i in self.samples]) - 1
        texts = [self._shard[i].input_ids for i in self.samples]
        for name, states in self._slots(parts[0].view(torch.uint8), parts[1].view(torch.uint8)):
            seen: dict[bytes, int] = {}
            for row, end in enumerate(ends):
                first = seen.setdefault(states[int(end)].numpy().tobytes(), row)
                differ = _first_difference(texts[first], texts[row])
                if differ is None:
                    continue
                here, there = (int(ends[r]) + 1 - len(texts[r]) + differ for r in (first, row))
                if torch.equal(states[here], states[there]):
                    one, other = self._shard[self.samples[first]].id, self._shard[self.samples[row]].id
                    raise StatesError(
                        f"samples '{one}' and '{other}' differ at token {differ} and have the same state of"
                        f" {name} there",
                        where=where,
                        fix="check that every captured layer runs for every row",
                    )


def _first_difference(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int | None:
    """First position at which two texts have different tokens; None when one begins with the other."""
    length = min(len(one), len(other))
    places = np.flatnonzero(one[:length] != other[:length])
    return int(places[0]) if len(places) else None


class Capture:
    """Captures the batches of shards into one device buffer `[rows, S, K+1, H]` that is used again and again.

    Args:
        target: whose layers are tapped.
        spec: of the run.
    """

    def __init__(self, target: Taps, spec: StatesSpec) -> None:
        self._target = target
        self._spec = spec
        self._slots = len(spec.layer_ids) + 1
        self._buffer = torch.empty(0, dtype=_DTYPE, device=target.device)
        cuda = target.device.type == "cuda"
        self._copies = torch.cuda.Stream(target.device) if cuda else None  # type: ignore[no-untyped-call]

    def host_bytes(self, tokens: int) -> int:
        """Host memory (bytes) that a batch with so many valid tokens takes."""
        return tokens * token_bytes(self._spec) + _FLAGS

    def run(self, shard: Sequence[ShardSample], batch: Batch) -> Captured:
        """Capture one batch. On CUDA the copy to pinned host memory goes on while the next batch computes.

        Raises:
            OutOfMemoryError: the batch does not fit the device or the host; names its size and the settings.
        """
        samples = [shard[i] for i in batch.samples]
        with fits(
            f"a batch of {len(samples)} rows × {batch.length} tokens does not fit {self._target.device}",
            where="extract",
            fix="lower extract.batch_tokens or extract.rows, or extract.max_tokens",
        ):
            return self._run(shard, batch, samples)

    @torch.no_grad()
    def _run(self, shard: Sequence[ShardSample], batch: Batch, samples: list[ShardSample]) -> Captured:
        device, width = self._target.device, self._spec.hidden_size
        taps = self._slots - 1
        rows, length = len(samples), batch.length
        ids = np.zeros((rows, length), dtype=np.int64)
        for row, sample in enumerate(samples):
            ids[row, : len(sample.input_ids)] = sample.input_ids
        lengths = np.array([len(sample.input_ids) for sample in samples], dtype=np.int64)
        valid = np.flatnonzero(np.arange(length)[None, :] < lengths[:, None])

        out = self._room(rows * length).view(rows, length, self._slots, width)
        self._target.capture(
            self._on_device(ids),
            self._on_device(lengths),
            self._spec.layer_ids,
            out=out,
        )
        # Packed on the device in one piece, element by element, with two flags behind them: one copy to the host brings
        # everything, and nothing there has to be taken apart.
        tokens = len(valid)
        packed = torch.empty(self.host_bytes(tokens), dtype=torch.uint8, device=device)
        index = self._on_device(valid)
        flat = out.view(rows * length, self._slots * width)
        parts = views(packed, self._spec, tokens)
        if self._spec.dtype == "bf16":
            hidden, last = parts[0].view(tokens, taps * width), parts[1]
            torch.index_select(flat[:, : taps * width], 0, index, out=hidden)
            torch.index_select(flat[:, taps * width :], 0, index, out=last)
            slots = [*parts[0].unbind(1), last]
        else:
            chosen = flat.index_select(0, index).view(tokens, self._slots, width)
            slots = list(chosen.unbind(1))
            for number, states in enumerate(slots):  # a layer at a time: in fp32 all of them take twice the buffer
                values, scales = quantise(states)
                to, scale = (parts[1], parts[3]) if number == taps else (parts[0][:, number], parts[2][:, number])
                to.copy_(values)
                scale.copy_(scales)
        peak = torch.stack([states.abs().amax(dim=-1) for states in slots])  # NaN and infinity survive amax
        packed[-2] = torch.isfinite(peak).all()
        packed[-1] = (peak != 0).all()
        host, ready = self._to_host(packed)
        return Captured(self._spec, shard, batch.samples, host, ready)

    def _on_device(self, values: npt.NDArray[np.int64]) -> Tensor:
        """A copy from ordinary memory would wait until the device has done all that was asked of it before, and the
        device would idle while the host prepares the next batch."""
        tensor = torch.from_numpy(values)
        if self._copies is None:
            return tensor.to(self._target.device)
        return tensor.pin_memory().to(self._target.device, non_blocking=True)

    def _room(self, positions: int) -> Tensor:
        needed = positions * self._slots * self._spec.hidden_size
        if self._buffer.numel() < needed:
            self._buffer = torch.empty(0, dtype=_DTYPE, device=self._target.device)  # give the old one back first
            self._buffer = torch.empty(needed, dtype=_DTYPE, device=self._target.device)
        return self._buffer[:needed]

    def _to_host(self, packed: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        if self._copies is None:
            return packed, None
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        self._copies.wait_stream(torch.cuda.current_stream(packed.device))
        with torch.cuda.stream(self._copies):
            host.copy_(packed, non_blocking=True)
            # The allocator must not hand `packed` to the next batch before the copy has read it.
            packed.record_stream(self._copies)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(self._copies)
        return host, ready
