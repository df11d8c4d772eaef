"""Ways to bring a target's states to files: ours, speculators' writer, the naive one; and the forward alone."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from shape27b import RandomCorpus, Sample
from torch import Tensor

from drafthouse.states import ExtractSettings, run_worker
from drafthouse.states.capture import plan
from drafthouse.store import Done, Store
from drafthouse.target import Target

SPECULATORS_WRITERS = 8  # threads of the connector that speculators 0.9.0 launches vLLM with


class Contenders:
    """Ways over one corpus."""

    def __init__(self, target: Target, corpus: RandomCorpus, extract: ExtractSettings, folder: Path) -> None:
        self.target, self.corpus, self.extract, self.folder = target, corpus, extract, folder
        self.cuda = target.device.type == "cuda"

    def ours(self) -> None:
        store = Store.open(tempfile.mkdtemp(dir=self.folder))
        work(store, self.corpus, self.target, self.extract)

    def batches(self) -> Iterator[tuple[list[Sample], Tensor]]:
        """The very batches that `ours` makes: samples and padded ids."""
        for name in self.corpus.shard_names:
            shard = self.corpus.shard(name)
            for batch in plan([len(sample.input_ids) for sample in shard], self.extract):
                ids = np.zeros((len(batch.samples), batch.length), dtype=np.int64)
                for row, sample in enumerate(batch.samples):
                    ids[row, : len(shard[sample].input_ids)] = shard[sample].input_ids
                yield [shard[sample] for sample in batch.samples], torch.from_numpy(ids).to(self.target.device)

    @torch.no_grad()
    def plain(self) -> None:
        """The forward alone."""
        for _, ids in self.batches():
            self.target.decoder(input_ids=ids, use_cache=False)

    @torch.no_grad()
    def speculators(self) -> None:
        """The write path of speculators 0.9.0 behind the same forward.

        Its offline extraction runs vLLM with `ExampleHiddenStatesConnector`: a stream of its own gathers the states of
        a request, [tokens, taps + 1, hidden], and copies them to pinned memory; eight threads save them, a file a
        request; the client moves each to its place (`cli/generate_offline_data.py`).
        """
        copies = torch.cuda.Stream() if self.cuda else None
        writes: list[Future[None]] = []
        last = self.target.num_layers - 1
        with ThreadPoolExecutor(SPECULATORS_WRITERS) as pool:
            for samples, ids in self.batches():
                with tapped(self.target, [*self.extract.layer_ids, last]) as kept:
                    self.target.decoder(input_ids=ids, use_cache=False)
                if copies is not None:
                    copies.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(copies) if copies is not None else nullcontext():
                    for row, sample in enumerate(samples):
                        picked = [kept[i][row, : len(sample.input_ids)] for i in (*self.extract.layer_ids, last)]
                        states = torch.stack(picked, dim=1).to(torch.bfloat16)
                        host = torch.empty_like(states, device="cpu", pin_memory=self.cuda)
                        host.copy_(states, non_blocking=True)
                        done = None
                        if copies is not None:
                            done = torch.cuda.Event()
                            done.record(copies)
                        tensors = {
                            "hidden_states": host,
                            "token_ids": torch.from_numpy(sample.input_ids.astype("int64")),
                        }
                        writes.append(pool.submit(self._save, tensors, done, sample.id))
                for tensor in kept.values():
                    if copies is not None:
                        tensor.record_stream(copies)
                while len(writes) > 4 * SPECULATORS_WRITERS:  # pinned memory is not endless
                    writes.pop(0).result()
        for write in writes:
            write.result()

    def _save(self, tensors: dict[str, Tensor], done: Any, name: str) -> None:
        if done is not None:
            done.synchronize()
        staged, place = self.folder / f"{name}.staged", self.folder / f"hs_{name}.safetensors"
        save_file(tensors, staged)
        shutil.move(staged, place)
        place.unlink()

    @torch.no_grad()
    def naive(self) -> None:
        """One forward a sample, one copy a tap, one file a sample: how such pipelines usually begin."""
        taps = [*self.extract.layer_ids, self.target.num_layers - 1]
        for name in self.corpus.shard_names:
            for sample in self.corpus.shard(name):
                ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None].to(self.target.device)
                with tapped(self.target, taps) as kept:
                    self.target.decoder(input_ids=ids, use_cache=False)
                tensors = {f"layer_{i}": kept[i][0].to(torch.bfloat16).cpu().clone() for i in taps}
                path = self.folder / f"{sample.id}.safetensors"
                save_file(tensors, path)
                path.unlink()


@contextmanager
def tapped(target: Target, layers: list[int]) -> Iterator[dict[int, Tensor]]:
    """The outputs of some decoder layers."""
    kept: dict[int, Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            kept[layer] = output if isinstance(output, Tensor) else output[0]

        return hook

    handles = [target.layers[i].register_forward_hook(keep(i)) for i in dict.fromkeys(layers)]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def work(store: Store, corpus: RandomCorpus, target: Target, extract: ExtractSettings) -> None:
    """One worker of ours. A shard that was committed is deleted: long runs need no large disk."""

    def moved_on(done: Done) -> None:
        store.child("runs/run").delete(done.key)

    summary = run_worker(store, "run", corpus, target, extract, f"rank{rank()}", on_shard=moved_on)
    print(
        f"    {summary.tokens} tokens in {summary.seconds:.2f} s, the device waited {summary.waited_s:.2f} s",
        flush=True,
    )


def rank() -> int:
    return int(os.environ.get("RANK", "0"))
