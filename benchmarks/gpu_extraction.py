"""Extraction at the shape of Qwen3.6-27B on one GPU: capture and writing against the plain forward, speculators' write
path and the naive way; and by torchrun on several GPUs of one host against one.

Random weights: only the time is measured. Every contender runs the same batches on the same model in one process, after
a warm-up of its kernels; what was written is deleted as soon as it is whole, as a consumer would move it on. Everything
is measured with each implementation of the gated delta rule that is here (`drafthouse.target.recurrence`: our chunks,
and flash-linear-attention's kernels where installed); the naive way runs transformers' reference where they are not.

python benchmarks/gpu_extraction.py --folder /dev/shm    # leaves benchmarks/results/gpu_extraction.json
torchrun --nproc-per-node 2 benchmarks/gpu_extraction.py --folder /dev/shm     # leaves .../gpu_extraction_ranks.json
python benchmarks/gpu_extraction.py --device cpu --small --layers 4 --out /tmp/rows.json
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from extraction_ways import Contenders, rank, work
from rows import Rows
from shape27b import SEED, RandomCorpus, long_shards, taps_of, target_of

from drafthouse.states import ExtractSettings
from drafthouse.store import Store
from drafthouse.target import Target, recurrence
from drafthouse.target.recurrence import Kernel

NAIVE_SAMPLES = 32  # the naive way takes a sample at a time: a few say how long each takes


def seconds(work: Callable[[], Any]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def one_gpu(rows: Rows, args: argparse.Namespace, target: Target, extract: ExtractSettings, folder: Path) -> None:
    width, vocabulary = extract.batch_tokens // 8, int(target.config.vocab_size)
    random = np.random.default_rng(SEED)
    shards = long_shards(args.tokens // (64 if args.small else 1), width)

    def over(lengths: list[list[int]]) -> Contenders:
        return Contenders(target, RandomCorpus(lengths, vocabulary), extract, folder)

    long, some, warm = over(shards), over(shards[: max(2, len(shards) // 4)]), over(shards[:2])
    # On short samples the naive way is bound by launches and ours by arithmetic: the ratio falls with their length.
    shorts = {longest: random.integers(longest // 2, longest + 1, 512).tolist() for longest in (32, 128)}
    count = 8 if args.small else NAIVE_SAMPLES
    shape = f"{args.layers} layers, {'small' if args.small else '27B'} shape"

    def rate(contender: Contenders, way: str, kernel: Kernel) -> float:
        with recurrence.forced(kernel):
            found = contender.corpus.tokens / seconds(getattr(contender, way))
        print(f"  {way} of {contender.corpus.tokens} tokens, {kernel}: {found:.0f} tokens/s", flush=True)
        return found

    for kernel in args.kernels:
        label = f"{shape}, {kernel}"
        usual: Kernel = "fla" if kernel == "fla" else "substitution"  # what transformers itself would run
        for which in ("plain", "ours", "speculators"):
            rate(warm, which, kernel)
        plain, ours = rate(long, "plain", kernel), rate(long, "ours", kernel)
        rows.add(
            f"extraction: capture and write, {label}", ours, "tokens/s",
            peer="plain forward of the same batches", ratio=ours / plain, bar=0.95,
        )  # fmt: skip
        rows.write(args.out)
        rows.add(
            f"extraction: capture and write, {label}", ours, "tokens/s",
            peer="the same forward with speculators' write path", ratio=ours / rate(long, "speculators", kernel),
        )  # fmt: skip
        if usual != kernel:
            rate(warm, "plain", usual)
            rows.add(
                f"extraction: capture and write, {label}", ours, "tokens/s",
                peer="plain forward, transformers' reference kernel", ratio=ours / rate(some, "plain", usual),
            )  # fmt: skip
        for longest, lengths in shorts.items():
            rate(over([lengths]), "ours", kernel)
            rate(over([lengths[:4]]), "naive", usual)
            fast, slow = rate(over([lengths]), "ours", kernel), rate(over([lengths[:count]]), "naive", usual)
            rows.add(
                f"extraction: samples of {longest // 2} to {longest} tokens, {label}", fast, "tokens/s",
                peer="one forward, one copy a tap, one file a sample", ratio=fast / slow, bar=20.0,
            )  # fmt: skip
            rows.write(args.out)
    size = (len(extract.layer_ids) + 1) * int(target.hidden_size) * 2
    rows.add("extraction: bytes of a token", size, "bytes", peer="taps and last state in bf16", ratio=1.0)
    if args.device != "cpu":
        peak = torch.cuda.max_memory_allocated() / 2**30
        weights = target.parameters * 2 / 2**30
        rows.add("extraction: peak device memory", peak, "GiB", peer="the weights alone", ratio=weights / peak)
    rows.write(args.out)


def many_ranks(rows: Rows, args: argparse.Namespace, target: Target, extract: ExtractSettings, folder: Path) -> None:
    """The first rank alone, then all of them over a corpus that is larger by their number; one store."""
    ranks, vocabulary = dist.get_world_size(), int(target.config.vocab_size)
    shards = long_shards(args.tokens // (64 if args.small else 1), extract.batch_tokens // 8)
    alone, together = RandomCorpus(shards, vocabulary), RandomCorpus(shards * ranks, vocabulary)
    shared: list[Any] = [tempfile.mkdtemp(dir=folder) if rank() == 0 else None]
    dist.broadcast_object_list(shared)
    store = Store.open(shared[0])
    kernel = args.kernels[0]
    with recurrence.forced(kernel):
        work(Store.open(tempfile.mkdtemp(dir=folder)), RandomCorpus(shards[:2], vocabulary), target, extract)
        dist.barrier()
        one = 0.0
        if rank() == 0:
            own = Store.open(tempfile.mkdtemp(dir=folder))
            one = alone.tokens / seconds(lambda: work(own, alone, target, extract))
        dist.barrier()

        def all_of_them() -> None:
            work(store, together, target, extract)
            dist.barrier()

        every = together.tokens / seconds(all_of_them)
    if rank() == 0:
        rows.add(
            f"extraction: {ranks} GPUs of one host, {args.layers} layers, {kernel}", every, "tokens/s",
            peer="one GPU", ratio=every / one, bar=0.95 * ranks,
        )  # fmt: skip
        rows.write(args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=64, help="decoder layers, a multiple of 4")
    parser.add_argument("--small", action="store_true", help="a small shape, to try the script on a CPU")
    parser.add_argument("--tokens", type=int, default=200_000, help="tokens of the long corpus, for each rank")
    parser.add_argument(
        "--kernels", nargs="*", choices=recurrence.available(), default=recurrence.available()[:-1],
        help="of the gated delta rule; none: all but the reference",
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, help="where shards are written (none: the temporary directory)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    name = "gpu_extraction" if ranks == 1 else "gpu_extraction_ranks"
    args.out = args.out or Path(__file__).parent / "results" / f"{name}.json"
    if ranks > 1:
        dist.init_process_group("gloo")
    if args.device != "cpu":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    rows, width = Rows(SEED), 128 if args.small else 2048
    target = target_of(args.small, args.layers, args.device)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        extract = ExtractSettings(
            layer_ids=taps_of(args.layers), batch_tokens=8 * width, max_tokens=8 * width, scratch=folder
        )
        (one_gpu if ranks == 1 else many_ranks)(rows, args, target, extract, Path(folder))
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
