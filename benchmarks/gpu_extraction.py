"""Extraction at the shape of Qwen3.6-27B on one GPU: capture and writing against the plain forward and the naive way.

Random weights: only the time is measured. Every contender runs the same batches on the same model in one process,
in turns, after a warm-up of each shape.

python benchmarks/gpu_extraction.py                      # leaves benchmarks/results/gpu_extraction.json
python benchmarks/gpu_extraction.py --device cpu --small --out /tmp/rows.json
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

sys.path.insert(0, str(Path(__file__).parent))
from rows import Rows

from drafthouse.states import ExtractSettings, run_worker
from drafthouse.states.capture import plan
from drafthouse.store import Store
from drafthouse.target import Target

SEED = 0
TAPS_27B = (1, 16, 31, 46, 61)  # the layers that the published drafter for Qwen3.6-27B reads
SHAPE_27B = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 248_320,
}
SHAPE_SMALL = SHAPE_27B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "vocab_size": 512,
}


@dataclass(frozen=True)
class Sample:
    """Random tokens in the form that the extraction takes."""

    id: str
    kind: str
    input_ids: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True)
class Manifest:
    digest: str


class RandomCorpus:
    """Shards of random tokens; lengths are given, so that every contender gets the same work."""

    def __init__(self, shards: Sequence[Sequence[int]], vocabulary: int) -> None:
        random = np.random.default_rng(SEED)
        self.manifest = Manifest("0" * 64)
        self._shards = {
            f"shard-{s:05d}": [
                Sample(f"{s}-{i}", "random", random.integers(0, vocabulary, n, dtype=np.int32), np.ones(n, np.uint8))
                for i, n in enumerate(lengths)
            ]
            for s, lengths in enumerate(shards)
        }

    @property
    def shard_names(self) -> list[str]:
        return list(self._shards)

    def shard(self, name: str) -> list[Sample]:
        return self._shards[name]

    @property
    def tokens(self) -> int:
        return sum(len(sample.input_ids) for shard in self._shards.values() for sample in shard)


def target_of(small: bool, layers: int, device: str) -> Target:
    """A hybrid of the 27B's shape with random weights, made on the device: 54 GB are not copied through the host."""
    shape = SHAPE_SMALL if small else SHAPE_27B
    config = Qwen3_5TextConfig(**shape, num_hidden_layers=layers, tie_word_embeddings=False)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(SEED)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Qwen3_5ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return Target(model, identity="random")


def seconds(device: str, work: Callable[[], Any]) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began


class Contenders:
    """Three ways over one corpus."""

    def __init__(self, target: Target, corpus: RandomCorpus, extract: ExtractSettings, folder: Path) -> None:
        self.target, self.corpus, self.extract, self.folder = target, corpus, extract, folder

    def ours(self) -> None:
        store = Store.open(tempfile.mkdtemp(dir=self.folder))
        run_worker(store, "run", self.corpus, self.target, self.extract, "bench")

    @torch.no_grad()
    def plain(self) -> None:
        """The forward alone, on the very batches that `ours` makes."""
        for name in self.corpus.shard_names:
            shard = self.corpus.shard(name)
            for batch in plan([len(sample.input_ids) for sample in shard], self.extract):
                ids = np.zeros((len(batch.samples), batch.length), dtype=np.int64)
                for row, sample in enumerate(batch.samples):
                    ids[row, : len(shard[sample].input_ids)] = shard[sample].input_ids
                self.target.decoder(input_ids=torch.from_numpy(ids).to(self.target.device), use_cache=False)

    @torch.no_grad()
    def naive(self) -> None:
        """One forward a sample, one copy a tap, one file a sample: how such pipelines usually begin."""
        kept: dict[int, torch.Tensor] = {}
        taps = [*self.extract.layer_ids, self.target.num_layers - 1]

        def keep(layer: int) -> Callable[..., None]:
            def hook(module: Any, args: Any, output: Any) -> None:
                kept[layer] = output if isinstance(output, torch.Tensor) else output[0]

            return hook

        handles = [self.target.layers[i].register_forward_hook(keep(i)) for i in dict.fromkeys(taps)]
        try:
            for name in self.corpus.shard_names:
                for sample in self.corpus.shard(name):
                    ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None].to(self.target.device)
                    self.target.decoder(input_ids=ids, use_cache=False)
                    tensors = {f"layer_{i}": kept[i][0].to(torch.bfloat16).cpu().clone() for i in taps}
                    save_file(tensors, self.folder / f"{sample.id}.safetensors")
        finally:
            for handle in handles:
                handle.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=64, help="decoder layers, a multiple of 4")
    parser.add_argument("--small", action="store_true", help="a small shape, to try the script on a CPU")
    parser.add_argument("--tokens", type=int, default=98_304, help="tokens of the long corpus")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where shards are written (none: the temporary directory)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_extraction.json")
    args = parser.parse_args()

    rows = Rows(SEED)
    taps = TAPS_27B if args.layers == 64 else tuple(sorted({1, args.layers // 2, args.layers - 3}))
    target = target_of(args.small, args.layers, args.device)
    vocabulary = int(target.config.vocab_size)
    width = 128 if args.small else 2048
    extract = ExtractSettings(layer_ids=taps, rows=64, batch_tokens=8 * width, max_tokens=8 * width)
    random = np.random.default_rng(SEED)
    long_shards, left = [], args.tokens // (16 if args.small else 1)
    while left > 0:
        lengths = random.integers(width // 2, width + 1, 8)
        long_shards.append(lengths.tolist())
        left -= int(lengths.sum())
    # On short samples the naive way is bound by launches and ours by arithmetic: the ratio falls with their length.
    shorts = {longest: random.integers(longest // 2, longest + 1, 256).tolist() for longest in (32, 128)}
    label = f"{args.layers} layers, {'small' if args.small else '27B'} shape"
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        long = Contenders(target, RandomCorpus(long_shards, vocabulary), extract, folder)
        short = {
            longest: Contenders(target, RandomCorpus([lengths], vocabulary), extract, folder)
            for longest, lengths in shorts.items()
        }
        print(f"{label}: {long.corpus.tokens} tokens in long samples", flush=True)
        best: dict[str, float] = {}
        contenders = {"long plain": long.plain, "long ours": long.ours}
        for longest, each in short.items():
            contenders |= {f"short {longest} naive": each.naive, f"short {longest} ours": each.ours}
        for which, work in contenders.items():
            print(f"warm-up, {which}: {seconds(args.device, work):.2f} s", flush=True)
        for _ in range(args.repeats):
            for which, work in contenders.items():
                took = seconds(args.device, work)
                best[which] = min(best.get(which, took), took)
                print(f"{which}: {took:.2f} s", flush=True)
                for written in folder.iterdir():  # the disk is small beside the states of a long corpus
                    shutil.rmtree(written) if written.is_dir() else written.unlink()
    tokens = long.corpus.tokens
    rows.add(
        f"extraction: capture and write, {label}",
        tokens / best["long ours"],
        "tokens/s",
        peer="plain forward of the same batches",
        ratio=best["long plain"] / best["long ours"],
        bar=0.95,
    )
    for longest, each in short.items():
        rows.add(
            f"extraction: samples of {longest // 2} to {longest} tokens, {label}",
            each.corpus.tokens / best[f"short {longest} ours"],
            "tokens/s",
            peer="one forward, one copy a tap, one file a sample",
            ratio=best[f"short {longest} naive"] / best[f"short {longest} ours"],
            bar=20.0,
        )
    size = (len(taps) + 1) * int(target.hidden_size) * 2
    rows.add("extraction: bytes of a token", size, "bytes", peer="taps and last state in bf16", ratio=1.0)
    if args.device != "cpu":
        peak = torch.cuda.max_memory_allocated() / 2**30
        weights = target.parameters * 2 / 2**30
        rows.add("extraction: peak device memory", peak, "GiB", peer="the weights alone", ratio=weights / peak)
    rows.write(args.out)


if __name__ == "__main__":
    main()
