"""A run of the loop at the size of a test: the package's own target, two grammar kinds, tiny drafters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.command_line import drafthouse

# Batches of one sample padded to 1,024 tokens: an extraction slow enough to be killed half-way.
RUN_FILE = """\
name: small
corpus:
  samples: 48
  samples_per_shard: 6
  heldout: 2
  max_tokens: 160
  sources:
    - {type: grammar, kind: lookup}
    - {type: grammar, kind: tool_call}
answers: {rows: 6, max_new_tokens: 24}
extract: {rows: 1, max_tokens: 1024, pad_multiple: 1024, batch_tokens: 1024, ttl_s: 2}
drafter:
  num_hidden_layers: 1
  num_attention_heads: 2
  num_key_value_heads: 1
  head_dim: 16
  block_size: 4
  target_layer_ids: [0, 2]
train:
  baseline: {steps: 12, rows: 4, anchors: 8, log_every: 4, checkpoint_every: 6, evaluate_every: 6}
  ours:
    steps: 12
    rows: 4
    anchors: 8
    log_every: 4
    checkpoint_every: 6
    evaluate_every: 6
    loss: {soft_weight: 0.5, weights: streak}
    noise: {kind: cosine, sigma: 0.05}
probe: {prompts: 1}
evaluate: {budgets: [4, 8], budget: 8, max_new_tokens: 24, rows: 8, samples: 2, wall_clock_prompts: 1}
"""
SHARDS = 8


@dataclass(frozen=True)
class Walked:
    """A finished run and the JSON that each of its verbs printed, by verb."""

    path: Path
    results: dict[str, dict[str, Any]]


def walk(folder: Path) -> Walked:
    """Every verb of the loop in turn, in this process, each with one worker."""
    run, file = folder / "run", folder / "small.yml"
    file.write_text(RUN_FILE, encoding="utf-8")
    verbs = {
        "build": ("corpus", "build", "--file", file),
        "answer": ("corpus", "answer", "--worker", "only"),
        "seal": ("corpus", "seal"),
        "extract": ("states", "extract", "--worker", "only"),
        "status": ("states", "status"),
        "baseline": ("drafter", "train", "baseline"),
        "ours": ("drafter", "train", "ours"),
        "evaluate": ("evaluate",),
        "report": ("report",),
    }
    return Walked(run, {name: drafthouse(*words, "--out", run, "--json").result for name, words in verbs.items()})
