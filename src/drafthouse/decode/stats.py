"""What decoding achieved: acceptance length, and a guard that tells a good drafter from a babbling target.

Acceptance length (tau) counts tokens per target pass, the target's own token included. The headline is the
micro average, all tokens over all passes: short easy answers lift the mean over prompts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from drafthouse.decode.generate import Generation


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of one drafter in one mode.

    Attributes:
        micro: tokens after prefill over target passes after prefill.
        macro: mean over prompts of the same ratio.
        per_position: share of passes in which at least k drafts were emitted, k = 1, 2, ...
        by_kind: micro average, prompts, tokens and passes of each kind of prompt.
    """

    micro: float
    macro: float
    tokens: int
    target_passes: int
    per_position: list[float]
    by_kind: dict[str, dict[str, float]]

    def as_dict(self) -> dict[str, Any]:
        return {
            "micro": round(self.micro, 4),
            "macro": round(self.macro, 4),
            "tokens": self.tokens,
            "target_passes": self.target_passes,
            "per_position": [round(share, 4) for share in self.per_position],
            "by_kind": self.by_kind,
        }


def acceptance(generations: Sequence[Generation], kinds: Sequence[str], positions: int) -> Acceptance:
    """Statistics of `generations`, one kind each; `positions` = block size - 1.

    A text that ended in its prefill has no pass and counts nowhere but in the number of prompts.
    """
    tokens, passes = _totals(generations)
    ratios = [sum(g.rounds) / len(g.rounds) for g in generations if g.rounds]
    drafted = np.array([count for g in generations for count in g.drafted], dtype=np.int64)
    groups: dict[str, list[Generation]] = defaultdict(list)
    for generation, kind in zip(generations, kinds, strict=True):
        groups[kind].append(generation)
    by_kind = {}
    for kind, group in sorted(groups.items()):
        emitted, rounds = _totals(group)
        by_kind[kind] = {
            "micro": round(emitted / max(1, rounds), 4),
            "prompts": len(group),
            "tokens": emitted,
            "target_passes": rounds,
        }
    return Acceptance(
        micro=tokens / max(1, passes),
        macro=float(np.mean(ratios)) if ratios else 0.0,
        tokens=tokens,
        target_passes=passes,
        per_position=[float((drafted >= k).mean()) if drafted.size else 0.0 for k in range(1, positions + 1)],
        by_kind=by_kind,
    )


def _totals(generations: Sequence[Generation]) -> tuple[int, int]:
    return sum(sum(g.rounds) for g in generations), sum(len(g.rounds) for g in generations)


def repeated_4grams(texts: Sequence[Sequence[int]]) -> float:
    """Share of 4-grams that already occurred in the same text; a looping target comes close to 1."""
    total = repeated = 0
    for tokens in texts:
        grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
        total += len(grams)
        repeated += len(grams) - len(set(grams))
    return repeated / max(1, total)


def degeneracy_guard(
    generations: Sequence[Generation], answers: Sequence[str], references: Sequence[str], kinds: Sequence[str]
) -> dict[str, Any]:
    """Exact-match rate (overall and by kind), repeated 4-grams, mean top-1 probability of the target's texts."""
    hits: dict[str, list[bool]] = defaultdict(list)
    for answer, reference, kind in zip(answers, references, kinds, strict=True):
        hits[kind].append(answer == reference)
    everything = [hit for group in hits.values() for hit in group]
    top1 = [p for g in generations for p in g.top1]
    return {
        "exact_match": round(sum(everything) / max(1, len(everything)), 4),
        "repeated_4grams": round(repeated_4grams([g.tokens for g in generations]), 4),
        "mean_top1_probability": round(float(np.mean(top1)) if top1 else 0.0, 4),
        "by_kind": {
            kind: {"prompts": len(group), "exact_match": round(sum(group) / len(group), 4)}
            for kind, group in sorted(hits.items())
        },
    }
