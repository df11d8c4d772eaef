"""A test double for a finished run: a report dict with plausible curves, made from a seed."""

from __future__ import annotations

import hashlib
import math
import random
import re
from typing import Any

KINDS = {"tool call": 64, "tool answer": 64, "repeat": 64, "key lookup": 64}
SKILL = {"baseline": 0.72, "ours": 0.785}
EASE = {"tool call": 0.06, "tool answer": -0.05, "repeat": 0.03, "key lookup": -0.09}
BLOCK = 8
BUDGETS = (4, 8, 16, 32)
TEXTS = (
    (
        "tool call",
        "<|im_start|>system\nYou can call tools.\n# Tools\n"
        '{"name": "set_timer", "parameters": {"minutes": "integer", "label": "string"}}<|im_end|>\n'
        "<|im_start|>user\nSet a timer of 17 minutes for the bread & butter.<|im_end|>\n"
        "<|im_start|>assistant\n",
        "<think>\nThe user wants set_timer.\n</think>\n\n<tool_call>\n"
        '{"name": "set_timer", "arguments": {"minutes": 17, "label": "bread & butter"}}\n'
        "</tool_call><|im_end|>",
    ),
    (
        "key lookup",
        "<|im_start|>user\nalpha is 41, borel is 7, corin is 93. What is borel?<|im_end|>\n<|im_start|>assistant\n",
        "borel is 7.<|im_end|>",
    ),
    (
        "repeat",
        "<|im_start|>user\nSay again:"
        " <b onclick=\"x()\">mastil</b> & 'tovane' <script>alert(1)</script><|im_end|>\n"
        "<|im_start|>assistant\n",
        "<b onclick=\"x()\">mastil</b> & 'tovane' <script>alert(1)</script><|im_end|>",
    ),
    (
        "tool answer",
        '<|im_start|>tool\n{"city": "Solif", "celsius": -4, "sky": "clear"}<|im_end|>\n<|im_start|>assistant\n',
        "It is -4 degrees in Solif and the sky is clear.<|im_end|>",
    ),
)


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def make_report(seed: int = 7) -> dict[str, Any]:
    rng = random.Random(seed)
    acceptance = {name: _acceptance(skill) for name, skill in SKILL.items()}
    lengths = {name: {mode: modes[mode]["micro"] for mode in ("chain", "tree")} for name, modes in acceptance.items()}
    gain = lengths["ours"]["chain"] / lengths["baseline"]["chain"] - 1
    shards = [_shard(rng, index) for index in range(16)]
    return {
        "name": "demo",
        "created": "2026-11-30T03:17:12+00:00",
        "machine": {
            "cpu_model": "AMD EPYC 9354 32-Core Processor",
            "architecture": "x86_64",
            "cpu_cores_logical": 2,
            "cpu_cores_usable": 2,
            "cpu_quota_cores": None,
            "memory_total_bytes": 25276514304,
            "memory_available_bytes": 24676450304,
            "memory_limit_bytes": None,
            "load_average_1min": 0.11,
            "load_average_5min": 0.17,
            "load_average_15min": 0.09,
            "os": "Debian GNU/Linux 12 (bookworm)",
            "kernel": "Linux 6.1.0",
            "python": "CPython 3.11.7",
            "versions": {"torch": "2.13.0+cpu", "transformers": "5.24.0", "obstore": "0.12.1"},
            "gpus": [],
        },
        "versions": {"drafthouse": "0.1.0", "torch": "2.13.0+cpu"},
        "seeds": {"corpus": 1, "generate": 2, "drafter": [3, 4], "evaluation": 11},
        "command": "drafthouse demo --run demo --set drafter.steps=1070",
        "config": {
            "corpus": {
                "samples": 2048,
                "mixture": {"tool call": 0.4, "tool answer": 0.2, "repeat": 0.2, "key lookup": 0.2},
            },
            "target": {"path": "builtin:tiny", "dtype": "float32"},
            "states": {"layer_ids": [0, 1], "workers": 2, "ttl_s": 20.0},
            "drafter": {"block_size": BLOCK, "num_hidden_layers": 2, "steps": 1070, "lr": 0.002},
            "decode": {"tree_budget": 16},
        },
        "config_digest": sha("config"),
        "seconds": {
            "corpus": 4.1,
            "generate": 83.7,
            "extract": 34.9,
            "train": 171.2,
            "evaluate": 27.4,
            "total": 322.6,
        },
        "corpus": {
            "samples": 2048,
            "tokens": 393_216,
            "kinds": {
                kind: {"samples": 512, "tokens": 98_304, "masked": 22_016 + 1_024 * place}
                for place, kind in enumerate(KINDS)
            },
            "drops": {"too_long": 12, "empty_mask": 3},
            "digest": sha("corpus"),
        },
        "target": {
            "name": "tiny hybrid",
            "identity": sha("target"),
            "parameters": 1_041_216,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "exact_match": 0.711,
            "repeated_4grams": 0.163,
            "mean_top1_probability": 0.884,
            "by_kind": {
                kind: {"prompts": prompts, "exact_match": 0.711 + 2.2 * EASE[kind]} for kind, prompts in KINDS.items()
            },
        },
        "shards": {
            "expected": 16,
            "committed": 16,
            "lost": 0,
            "duplicated": 0,
            "redone": 2,
            "killed_worker": "w1",
            "table": shards,
        },
        "training": {
            "baseline": _training(rng, "cross-entropy with fixed position decay", "ce", 0.0),
            "ours": _training(rng, "soft labels, streak-aware weights, cosine noise", "kl", 0.055),
        },
        "acceptance_length": lengths,
        "acceptance": acceptance,
        "autoregressive": {"target_passes": 9_216, "tokens": 9_216},
        "greedy_identical": True,
        "identical": {"prompts": 256, "chain": 256, "tree": 256},
        "wall_clock": {
            "threads": 2,
            "batch": 1,
            "modes": {
                "autoregressive": {"tokens": 2304, "seconds": 7.61, "target_passes": 2304},
                "chain": {"tokens": 2304, "seconds": 6.90, "target_passes": 740},
                "tree": {"tokens": 2304, "seconds": 8.86, "target_passes": 612},
            },
        },
        "peak_memory_bytes": 1_873_000_000,
        "samples": [_sample(rng, place, *texts) for place, texts in enumerate(TEXTS)],
        "verdict": (
            f"Our recipe keeps {lengths['ours']['chain']:.2f} tokens per target pass on held-out prompts, "
            f"{gain:.0%} more than the baseline, and writes the same text as plain decoding."
        ),
    }


def _survival(skill: float) -> list[float]:
    """P(accept ≥ k): the first slot is the hardest to lose, later ones lean on a streak."""
    values, alive = [], 1.0
    for slot in range(1, BLOCK):
        alive *= min(0.97, skill + 0.02 * slot)
        values.append(round(alive, 4))
    return values


def _cell(skill: float, tokens: int = 9_216) -> dict[str, Any]:
    micro = 1 + sum(_survival(skill))
    by_kind = {}
    for kind, prompts in KINDS.items():
        length = 1 + sum(_survival(skill + EASE[kind]))
        by_kind[kind] = {
            "micro": length,
            "prompts": prompts,
            "tokens": tokens // 4,
            "target_passes": round(tokens / 4 / length),
        }
    return {
        "micro": micro,
        "macro": micro * 1.18,
        "target_passes": round(tokens / micro),
        "tokens": tokens,
        "per_position": _survival(skill),
        "by_kind": by_kind,
    }


def _acceptance(skill: float) -> dict[str, Any]:
    tree = {budget: _cell(skill + 0.016 * math.log2(budget)) for budget in BUDGETS}
    return {
        "chain": _cell(skill),
        "tree": {
            "budget": 16,
            **tree[16],
            "by_budget": {str(budget): {"micro": c["micro"], "macro": c["macro"]} for budget, c in tree.items()},
        },
    }


def _training(rng: random.Random, label: str, loss: str, lift: float) -> dict[str, Any]:
    steps, per_step = 1070, 2048
    curve = []
    for step in range(0, steps + 1, 5):
        progress = step / steps
        learned = 1 - math.exp(-3.2 * progress)
        point = {
            "step": step,
            "tokens": step * per_step,
            "loss": (6.1 if loss == "ce" else 4.7) * (1 - 0.72 * learned) + rng.gauss(0, 0.09),
            "accuracy": min(1.0, max(0.0, (0.56 + lift) * learned + rng.gauss(0, 0.012))),
            "lr": 2e-3 * min(1.0, step / 60) * (0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2),
        }
        if lift:
            point["noise"] = 0.1 * (1 + math.cos(math.pi * progress)) / 2
        if step % 105 == 0:
            point["acceptance"] = 1 + (2.35 + 6 * lift) * learned**1.5
        curve.append(point)
    recipe = {
        "loss": "hard cross-entropy" if loss == "ce" else "KL to the target, T = 1, 20 % hard labels",
        "position_weights": "exp decay, γ = 4" if loss == "ce" else "streak-aware",
        "noise": "none" if loss == "ce" else "cosine, 0.1 → 0",
        "optimizer": "AdamW",
        "learning_rate": 0.002,
        "anchors_per_row": 24,
        "rows_per_step": 8,
    }
    return {
        "label": label,
        "recipe": recipe,
        "parameters": 443_264,
        "steps": steps,
        "tokens": steps * per_step,
        "curve": curve,
        "slot_accuracy": [max(0.0, 0.81 + lift - 0.055 * slot) for slot in range(BLOCK - 1)],
    }


def _shard(rng: random.Random, index: int) -> dict[str, Any]:
    tokens = 24_576 + rng.randrange(-900, 900)
    redone = index in (6, 7)
    return {
        "shard": sha(f"shard {index}")[:16],
        "samples": 128,
        "tokens": tokens,
        "bytes": tokens * 128 * 2 * 4 + 8192,
        "worker": "w0" if redone or index % 2 == 0 else "w1",
        "epoch": 1 if redone else 0,
        "seconds": 1.9 + rng.random(),
        "sha256": sha(f"bytes {index}"),
    }


def _sample(rng: random.Random, place: int, kind: str, prompt: str, reference: str) -> dict[str, Any]:
    pieces = re.findall(r"<\|[^|]*\|>|\s?[A-Za-z_]{1,6}|\s?\d|\n|\s?[^\w\s]{1,2}|\s", reference)
    assert "".join(pieces) == reference
    runs = {}
    for key, skill in (
        ("baseline/chain", 0.70),
        ("ours/chain", 0.80),
        ("baseline/tree", 0.80),
        ("ours/tree", 0.88),
    ):
        tokens, number = [{"text": pieces[0], "source": "target", "round": 0}], 0
        while len(tokens) < len(pieces):
            number += 1
            kept = 0
            while kept < BLOCK - 1 and rng.random() < skill:
                kept += 1
            for text in pieces[len(tokens) : len(tokens) + kept]:
                tokens.append({"text": text, "source": "draft", "round": number})
            if len(tokens) < len(pieces):
                tokens.append({"text": pieces[len(tokens)], "source": "target", "round": number})
        runs[key] = {"tokens": tokens, "rounds": number + 1}
    return {
        "id": f"held-out-{place:03d}",
        "kind": kind,
        "prompt": prompt,
        "reference": reference.removesuffix("<|im_end|>"),
        "runs": runs,
    }
