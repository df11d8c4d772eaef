"""A mid-size Gated-DeltaNet hybrid, trained on the spot from text that lies on every machine (midsize_texts.py).

By itself this measures how fast it trains, without reading any text:

python benchmarks/midsize.py --seconds 12                 # on a GPU: the step as it is, and compiled
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drafthouse.config import digest_of
from drafthouse.corpus import load_tokenizer, save_tokenizer, train_tokenizer
from drafthouse.corpus.records import Prompt, TokenSample
from drafthouse.loop.tiny import samples_sha256
from drafthouse.target.flat import FlatTexts
from drafthouse.target.packed_training import PackedTraining, train_packed
from drafthouse.target.tiny import TinyShape

SEED = 0
SHAPE = TinyShape(
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    linear_num_key_heads=4,
    linear_num_value_heads=4,
    linear_head_dim=128,
)
SMALL = TinyShape()
TAPS = (1, 2, 4, 5)
VOCABULARY, SMALL_VOCABULARY = 4096, 1024


@dataclass(frozen=True)
class Manifest:
    digest: str
    tokens: int


class MemoryCorpus:
    """Samples in shards, as `drafthouse.states` wants a corpus."""

    def __init__(self, samples: Sequence[TokenSample], per_shard: int) -> None:
        parts = [samples[first : first + per_shard] for first in range(0, len(samples), per_shard)]
        self._shards = {f"shard-{number:05d}": part for number, part in enumerate(parts)}
        self.manifest = Manifest(samples_sha256(samples), sum(len(one.input_ids) for one in samples))

    @property
    def shard_names(self) -> list[str]:
        return list(self._shards)

    def shard(self, name: str) -> Sequence[TokenSample]:
        return self._shards[name]


def training_of(device: str, *, small: bool, compiled: bool, seconds: float, **more: Any) -> PackedTraining:
    """How the target is trained on `device`."""
    cuda = torch.device(device).type == "cuda"
    return PackedTraining(
        **{
            "seconds": seconds,
            "rows": 8 if small else 64,
            "width": 512,
            "warmup_steps": 20 if small else 100,
            "matmuls": "bfloat16" if cuda else "float32",
            "compiled": compiled,
            "seed": SEED,
            "log_every": 5 if small else 50,
            **more,
        }
    )


def train_target(
    texts: FlatTexts,
    held_out: dict[str, list[TokenSample]],
    tokenizer_folder: Path,
    out: Path,
    training: PackedTraining,
    *,
    small: bool,
    device: str,
) -> dict[str, Any]:
    """Train the target into the model folder `out`; returns the content of training.json."""
    return train_packed(
        texts,
        held_out,
        load_tokenizer(tokenizer_folder),
        out,
        SMALL if small else SHAPE,
        training,
        device=device,
        provenance={"data_sha256": texts.sha256(), "seed": SEED},
        on_log=lambda row: print(json.dumps(row), flush=True),
    )


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """sha256 (hex) of prompts in order."""
    return digest_of([hashlib.sha256(prompt.input_ids.tobytes()).hexdigest() for prompt in prompts])


class Race:
    """Which way trains faster, as it is or compiled? Asked of a process of its own, while texts are being read.

    What it compiles stays in `cache`, so that the training need not compile again; and should compiling fail or outlast
    its time, the training is none the worse.
    """

    def __init__(self, device: str, cache: Path, seconds: float) -> None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
        self._deadline = time.time() + seconds
        command = [sys.executable, str(Path(__file__)), "--device", device, "--seconds", "3"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def compiled_is_faster(self) -> bool:
        """Waits for the process until its time is up."""
        try:
            said, _ = self._process.communicate(timeout=max(1.0, self._deadline - time.time()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            said, _ = self._process.communicate()
        ways = dict(line.split(" ", 1) for line in said.splitlines() if line.startswith(("plain ", "compiled ")))
        print(
            f"training as it is: {ways.get('plain')}; compiled: {ways.get('compiled', 'failed, or too slow')}",
            flush=True,
        )
        rates = {way: json.loads(row)["tokens_per_s"] for way, row in ways.items()}
        return bool(rates.get("compiled", 0) > rates.get("plain", 0))


def random_texts(count: int, vocabulary: int) -> FlatTexts:
    """Texts of the usual lengths that say nothing."""
    random = np.random.default_rng(SEED)
    samples = []
    for number in range(count):
        ids = random.integers(4, vocabulary, int(random.integers(60, 400))).astype(np.int32)
        samples.append(TokenSample(str(number), "random", ids, np.ones(len(ids), dtype=np.uint8)))
    return FlatTexts.of(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=12.0, help="of training, each way")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--only", choices=("plain", "compiled"), help="one of the two ways")
    args = parser.parse_args()
    vocabulary = SMALL_VOCABULARY if args.small else VOCABULARY
    texts = random_texts(4000, vocabulary)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = np.random.default_rng(SEED).integers(97, 123, (20_000, 6)).astype(np.uint8)
        tokenizer = train_tokenizer((" ".join(bytes(word).decode() for word in words),) * 2, vocabulary)
        save_tokenizer(tokenizer, folder / "tokenizer")
        for way in ("plain", "compiled"):
            if args.only in (None, way):
                training = training_of(
                    args.device, small=args.small, compiled=way == "compiled", seconds=args.seconds, rows=args.rows
                )
                report = train_target(
                    texts, {}, folder / "tokenizer", folder / way, training, small=args.small, device=args.device
                )
                keys = ("parameters", "steps", "tokens", "seconds", "first_step_seconds", "tokens_per_s", "peak_gib")
                print(way, json.dumps({key: report[key] for key in keys}), flush=True)


if __name__ == "__main__":
    main()
