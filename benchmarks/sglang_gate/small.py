"""A small sharp target and a half-trained drafter, made on the spot where none is given.

The texts copy from their prompts, which a small hybrid learns in seconds and then says with certainty: greedy texts of
two engines can be compared token by token. The drafter is stopped early, because one that foresees everything is
accepted whole even with taps of the wrong layers.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from drafthouse.corpus import CorpusReader, CorpusSettings, build, load_tokenizer, prompts
from drafthouse.corpus.grammar import GRAMMAR_KINDS
from drafthouse.drafter import DrafterShape, TrainSettings, train
from drafthouse.loop.tiny import embedded_target, parallel_samples
from drafthouse.progress import Silent
from drafthouse.states import ExtractSettings, StatesReader, run_worker
from drafthouse.store import Store
from drafthouse.target import Target
from drafthouse.target.tiny import TinyShape, TinyTraining, train_tiny

SHAPE = TinyShape(
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_head_dim=128,
)
RECIPE = "gate"
# One layer of each kind: sliding layers are causal in their block, full ones look both ways.
DRAFTER = DrafterShape(
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    block_size=8,
    target_layer_ids=(0, 1, 2),
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=32,
)


def corpus_of(samples: int, heldout: int) -> CorpusSettings:
    sources = [{"type": "grammar", "kind": kind} for kind in GRAMMAR_KINDS]
    return CorpusSettings.model_validate(
        {"sources": sources, "samples": samples, "heldout": heldout, "max_tokens": 224}
    )


def make(
    out: Path,
    *,
    device: str,
    embedded: bool,
    samples: int = 49_152,
    target_steps: int = 700,
    drafter_samples: int = 2048,
    drafter_steps: int = 160,
    heldout: int = 16,
) -> dict[str, Any]:
    """Write `out/target`, `out/gate` (the drafter) and `out/held.json`, as gpu_ablation.py --keep does.

    Args:
        embedded: take the target that travels with the package instead of training one.

    Returns:
        What is worth recording about both.
    """
    tokenizer = load_tokenizer(embedded_target())
    facts: dict[str, Any] = {}
    if embedded:
        shutil.copytree(embedded_target(), out / "target")
    else:
        corpus = parallel_samples(corpus_of(samples, 0), tokenizer, min(16, os.cpu_count() or 1), Silent())
        training = TinyTraining(steps=target_steps, rows=64, warmup_steps=60, decay_fraction=0.4)
        report = train_tiny(corpus, corpus[:64], tokenizer, out / "target", SHAPE, training, device=device)
        facts = {"target_steps": target_steps, "target_s": report["seconds"], "target": report["held_out"]}
        print(f"target: {facts}", flush=True)
    facts |= train_drafter(out, tokenizer, device=device, samples=drafter_samples, steps=drafter_steps)
    asked = prompts(corpus_of(1, heldout), tokenizer)
    held = [{"id": p.id, "kind": p.kind, "ids": p.input_ids.tolist(), "reference": p.reference} for p in asked]
    (out / "held.json").write_text(json.dumps(held), encoding="utf-8")
    return facts


def train_drafter(out: Path, tokenizer: Any, *, device: str, samples: int, steps: int) -> dict[str, Any]:
    """Extract states of texts, train on them with drafthouse's own trainer, and export with its own exporter."""
    began = time.perf_counter()
    target = Target.load(out / "target", device=device)
    config = DRAFTER.for_target(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
        mask_token_id=target.mask_token_id,
        identity=target.identity,
    )
    store = Store.open(str(out / "store"))
    extract = ExtractSettings(layer_ids=config.target_layer_ids, rows=64, batch_tokens=16_384, max_tokens=256)
    build(corpus_of(samples, 0), tokenizer, store, "corpus")
    run_worker(store, "states", CorpusReader(store, "corpus"), target, extract, "gate")
    settings = TrainSettings.model_validate(
        {
            "steps": steps,
            "rows": 16,
            "anchors": 16,
            "optimizer": {"kind": "muon", "lr": 2e-3, "muon_lr": 5e-3},
            "log_every": max(1, steps // 10),
            "checkpoint_every": 10**6,
        }
    )
    result = train(StatesReader(store, "states", in_memory_bytes=8 << 30), target, config, settings, out / "training")
    shutil.copytree(out / "training" / "drafter", out / RECIPE)
    seconds = round(time.perf_counter() - began, 1)
    print(f"drafter: {steps} steps, loss {result.loss:.3f}, {seconds} s with its states", flush=True)
    return {"drafter_steps": steps, "drafter_loss": result.loss, "drafter_s": seconds}
