"""Batches on the training device, the next one on its way while this one is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeviceBatch:
    """Documents as rows, right-padded, on the training device.

    Attributes:
        input_ids: int64 [rows, seq]; loss_mask: [rows, seq]; lengths: int64 [rows].
        hidden_states: [rows, seq, K, hidden].
        last_hidden_state: [rows, seq, hidden]; None where no loss asks for the target's distribution.
        tokens: documents' tokens, without padding.
    """

    input_ids: Tensor
    loss_mask: Tensor
    lengths: Tensor
    hidden_states: Tensor
    last_hidden_state: Tensor | None
    tokens: int


class Feed:
    """Iterates over `batches`; what it yields follows from them alone, on any device.

    On CUDA a thread puts the next batch together, in pinned memory, and copies it on a stream of its own: at the size
    of the 27B's states a batch is a quarter of a gigabyte, and copying it would cost as much as a fifth of the step.

    Args:
        batches: yields batches with the attributes that `trainer.Batch` names.
        teacher: whether the loss reads `last_hidden_state`.
        ahead: batches on the device beyond the current one.
    """

    def __init__(self, batches: Iterator[Any], device: torch.device, *, teacher: bool, ahead: int = 1) -> None:
        self._batches, self._device, self._teacher = batches, device, teacher
        self._threaded = device.type == "cuda"
        self._ended = threading.Event()
        self._ready: queue.Queue[tuple[DeviceBatch, Any] | BaseException] = queue.Queue(ahead)
        if self._threaded:
            self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._thread = threading.Thread(target=self._work, name="feed", daemon=True)
            self._thread.start()

    def __next__(self) -> DeviceBatch:
        if not self._threaded:
            return self._moved(next(self._batches))
        found = self._ready.get()
        if isinstance(found, BaseException):
            raise found
        batch, arrived = found
        current = torch.cuda.current_stream(self._device)
        current.wait_event(arrived)
        for value in vars(batch).values():
            if isinstance(value, Tensor):
                value.record_stream(current)
        return batch

    def close(self) -> None:
        """End the thread; the feed yields nothing afterwards."""
        self._ended.set()
        if self._threaded:
            while self._thread.is_alive():
                try:
                    self._ready.get(timeout=0.05)
                except queue.Empty:
                    continue

    def _work(self) -> None:
        try:
            while not self._ended.is_set():
                batch = next(self._batches)
                with torch.cuda.stream(self._stream):
                    moved = self._moved(batch)
                    arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    arrived.record(self._stream)
                self._ready.put((moved, arrived))
        except BaseException as error:  # the training thread raises it
            self._ready.put(error)

    def _moved(self, batch: Any) -> DeviceBatch:
        def move(tensor: Tensor) -> Tensor:
            if self._threaded:
                return tensor.pin_memory().to(self._device, non_blocking=True)
            return tensor.to(self._device)

        return DeviceBatch(
            input_ids=move(batch.input_ids),
            loss_mask=move(batch.loss_mask),
            lengths=move(batch.lengths),
            hidden_states=move(batch.hidden_states),
            last_hidden_state=move(batch.last_hidden_state) if self._teacher else None,
            tokens=int(batch.lengths.sum()),
        )
