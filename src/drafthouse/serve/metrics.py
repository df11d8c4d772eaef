"""Acceptance length from an engine's Prometheus page, as the difference of two readings.

* vLLM: counters `vllm:spec_decode_num_{drafts,accepted_tokens}_total`; a round yields its accepted drafts and one
  token of the target's own.
* SGLang: counters `sglang:generation_tokens_total`, `sglang:spec_verify_calls_total` and the count of finished
  requests, whose first token comes from prefill and not from a verify pass. The gauge `sglang:spec_accept_length`
  is that of the last log interval only, and stands at 0 without drafting: it is the second choice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{.*\})?\s+(\S+)(?:\s+-?\d+)?$")

_VLLM_DRAFTS = "vllm:spec_decode_num_drafts_total"
_VLLM_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_SGLANG_VERIFY = "sglang:spec_verify_calls_total"
_SGLANG_TOKENS = "sglang:generation_tokens_total"
_SGLANG_REQUESTS = "sglang:e2e_request_latency_seconds_count"
_SGLANG_GAUGE = "sglang:spec_accept_length"


@dataclass(frozen=True)
class Acceptance:
    """Tokens per verify pass, the target's own included, and how it was read."""

    length: float
    rounds: int | None
    source: str


def parse(text: str) -> dict[str, float]:
    """Samples of a Prometheus text page by name, summed over labels (text exposition format 0.0.4).

    Series of the ranks of one server are added up: right for counters, and gauges of a single rank.
    """
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line.strip())
        if match is None:
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        found[match[1]] = found.get(match[1], 0.0) + value
    return found


def acceptance(before: Mapping[str, float], after: Mapping[str, float]) -> Acceptance | None:
    """Acceptance length between two readings of one server; None when nothing was drafted in between.

    Args:
        before, after: results of `parse`; an empty `before` means since the server's start.
    """

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    if (drafts := grown(_VLLM_DRAFTS)) > 0:
        return Acceptance(1 + grown(_VLLM_ACCEPTED) / drafts, int(drafts), "vLLM counters")
    if (rounds := grown(_SGLANG_VERIFY)) > 0 and _SGLANG_REQUESTS in after:
        tokens = grown(_SGLANG_TOKENS) - grown(_SGLANG_REQUESTS)
        return Acceptance(tokens / rounds, int(rounds), "SGLang counters")
    if (gauge := after.get(_SGLANG_GAUGE, 0.0)) > 0:
        return Acceptance(gauge, None, "SGLang gauge of the last log interval")
    return None
