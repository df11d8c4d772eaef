"""A training run of a few steps whose losses are kept in short_run.json.

Its texts come from the grammar and the tokenizer of the embedded target, so they are the same on every
machine. Record it anew, when the recipe changes on purpose, with `python -m tests.unit.target.short_run`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from drafthouse.corpus import CorpusSettings, GrammarSource, TokenSample, load_tokenizer, token_samples
from drafthouse.target.tiny import TinyShape, TinyTraining, train_tiny

EMBEDDED = Path(str(files("drafthouse.target") / "embedded"))
REFERENCE = Path(__file__).with_name("short_run.json")
KINDS = ("tool_call", "tool_answer", "lookup", "repeat")
TRAINING = TinyTraining(steps=8, rows=8, warmup_steps=3, decay_fraction=0.4, seed=5, log_every=1)


def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer(EMBEDDED)


def samples(count: int = 40) -> list[TokenSample]:
    sources = tuple(GrammarSource(kind=kind) for kind in KINDS)
    return list(token_samples(CorpusSettings(sources=sources, samples=count, seed=3), tokenizer()))


def sha256(texts: Sequence[TokenSample]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.input_ids.astype("<i4").tobytes() + text.loss_mask.tobytes() + b"\n")
    return digest.hexdigest()


def run(out: Path, **others: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    return train_tiny(samples(), samples(8), tokenizer(), out, TinyShape(), TRAINING, **others)


def main() -> None:
    with TemporaryDirectory() as folder:
        report = run(Path(folder) / "target")
    kept = {
        "data_sha256": sha256(samples()),
        "tokens": report["tokens"],
        "held_out": report["held_out"],
        "curve": [
            {name: entry[name] for name in ("step", "tokens", "loss", "assistant_loss")} for entry in report["curve"]
        ],
    }
    REFERENCE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
