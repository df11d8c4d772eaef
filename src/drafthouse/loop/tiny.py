"""`target train-tiny`: corpus, tokenizer, training and the proof that the result answers, in one step."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import Field
from transformers import PreTrainedTokenizerFast

from drafthouse.config import Settings
from drafthouse.corpus import (
    CorpusSettings,
    StdlibSource,
    load_tokenizer,
    prompts,
    save_tokenizer,
    token_samples,
    tokenizer_sha256,
    train_tokenizer,
    training_texts,
)
from drafthouse.corpus.records import TokenSample
from drafthouse.corpus.sources import library
from drafthouse.decode.evaluate import EvaluateSettings, evaluate_target
from drafthouse.progress import Progress, Silent
from drafthouse.target import Target
from drafthouse.target.adapter import check_device
from drafthouse.target.tiny import TinyShape, TinyTraining, check_replaceable, train_tiny

EMBEDDED = "embedded"
EMBEDDED_RECIPE = Path(str(files("drafthouse.loop") / "embedded.yml"))
TOKENIZER_TEXTS = 9_000
HELD_OUT_LOSS_SAMPLES = 64


def embedded_target() -> Path:
    """The folder of the small target that travels with the package."""
    return Path(str(files("drafthouse.target") / "embedded"))


class TargetSettings(Settings):
    """Which model is served, and how a small one is trained in its place."""

    path: str = Field(EMBEDDED, description="model folder, or 'embedded' for the small target of the package")
    device: str = Field("cpu", description="a torch device")
    from_scratch: bool = Field(False, description="train the small target first instead of loading `path`")
    vocab_size: int = Field(1024, ge=300, description="of the tokenizer that is trained with it")
    corpus: CorpusSettings = Field(default_factory=CorpusSettings, description="its training conversations")
    corpus_parts: int = Field(1, ge=1, description="corpora with consecutive seeds, made side by side")
    shape: TinyShape = Field(default_factory=TinyShape)
    training: TinyTraining = Field(default_factory=TinyTraining)


def train_embedded(settings: TargetSettings, out: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Train a small target as `settings` say and write the model folder `out` with its training.json.

    The report holds the settings, the data hash, the loss curve, and what the finished target does on
    held-out prompts (exact match by kind, repeated 4-grams, mean top-1 probability).
    """
    progress = progress or Silent()
    check_replaceable(out)
    check_device(settings.device)
    tokenizer = train_tokenizer(training_texts(settings.corpus, TOKENIZER_TEXTS), settings.vocab_size)
    samples = parallel_samples(settings.corpus, tokenizer, settings.corpus_parts, progress)
    held_out = list(token_samples(settings.corpus, tokenizer, "heldout"))[:HELD_OUT_LOSS_SAMPLES]
    provenance = {
        "command": _command(),
        "data_sha256": samples_sha256(samples),
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "corpus": settings.corpus.model_dump(mode="json"),
        "corpus_parts": settings.corpus_parts,
        "python_stdlib": _fingerprint(settings.corpus),
        "python": sys.version.split()[0],
    }
    return train_tiny(
        samples,
        held_out,
        tokenizer,
        out,
        settings.shape,
        settings.training,
        device=settings.device,
        provenance=provenance,
        progress=progress,
        finish=partial(_guard, settings=settings, progress=progress),
    )


def _command() -> str:
    """The command line with absolute paths cut to their names: it is kept with the weights and travels."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return " ".join(["drafthouse", *words])


def parallel_samples(
    corpus: CorpusSettings, tokenizer: PreTrainedTokenizerFast, parts: int, progress: Progress
) -> list[TokenSample]:
    """Training samples of `parts` corpora with consecutive seeds, made in one process each.

    The result depends on `parts`, not on how many processors there are.
    """
    share = corpus.samples // parts
    if parts == 1:
        return list(token_samples(corpus, tokenizer, "train", progress=progress))
    samples: list[TokenSample] = []
    with TemporaryDirectory() as folder, progress.task("corpus", parts) as task:
        save_tokenizer(tokenizer, Path(folder))
        pieces = [corpus.model_copy(update={"seed": corpus.seed + part, "samples": share}) for part in range(parts)]
        with ProcessPoolExecutor(min(parts, os.cpu_count() or 1)) as pool:
            for made in pool.map(partial(_part, Path(folder)), pieces):
                samples += made
                task.advance()
    return samples


def _part(tokenizer_folder: Path, corpus: CorpusSettings) -> list[TokenSample]:
    torch.set_num_threads(1)
    return list(token_samples(corpus, load_tokenizer(tokenizer_folder), "train"))


def samples_sha256(samples: Sequence[TokenSample]) -> str:
    """sha256 (hex) over token ids and masks in order."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(len(sample.input_ids).to_bytes(4, "little"))
        digest.update(sample.input_ids.astype("<i4").tobytes())
        digest.update(sample.loss_mask.tobytes())
    return digest.hexdigest()


def _fingerprint(corpus: CorpusSettings) -> str | None:
    used = any(isinstance(source, StdlibSource) for source in corpus.sources)
    return library("train").fingerprint if used else None


def _guard(model: Any, tokenizer: PreTrainedTokenizerFast, *, settings: TargetSettings, progress: Progress) -> Any:
    questions = prompts(settings.corpus, tokenizer)
    baseline = evaluate_target(Target(model, tokenizer), questions, EvaluateSettings(rows=256), progress)
    return {"prompts": len(questions), **baseline.guard}
