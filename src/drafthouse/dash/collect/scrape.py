"""Prometheus pages of engines: read over HTTP, and what two readings of one say."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from drafthouse.errors import DrafthouseError

TIMEOUT_S = 5.0
LARGEST = 16 << 20


class ScrapeError(DrafthouseError):
    """A metrics endpoint that does not answer with metrics."""


@dataclass(frozen=True)
class Reading:
    """One reading of a page.

    Attributes:
        sums: sample name -> sum over all its series: right for counters.
        means: the same as mean: right for gauges that are shares.
        buckets: name of a histogram -> upper bound -> count, summed over its series.
        labels: label -> its first value anywhere.
    """

    sums: dict[str, float] = field(default_factory=dict)
    means: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)


def fetch(client: httpx2.Client, url: str) -> str:
    """The page at `url`.

    Raises:
        ScrapeError: nobody answers, or not with a page of reasonable size.
    """
    body = bytearray()
    try:
        with client.stream("GET", url) as answer:
            for part in answer.iter_bytes():
                body += part
                if len(body) > LARGEST:
                    raise ScrapeError(f"the page is larger than {LARGEST >> 20} MiB", where=url)
    except httpx2.HTTPError as error:
        reason = "no answer in time" if isinstance(error, httpx2.TimeoutException) else "it cannot be reached"
        raise ScrapeError(
            reason, where=url, fix="check that the server runs and that this machine reaches it"
        ) from None
    if answer.status_code != 200:
        fix = "start the engine with its metrics on" if answer.status_code == 404 else None
        raise ScrapeError(f"it answers {answer.status_code}", where=url, fix=fix)
    return body.decode(errors="replace")


def parse(text: str, url: str) -> Reading:
    """A page in the text format of Prometheus.

    Raises:
        ScrapeError: it is none, or prometheus-client is not installed.
    """
    try:
        parser: Any = importlib.import_module("prometheus_client.parser")
    except ImportError:
        raise ScrapeError(
            "prometheus-client is not installed", where=url, fix="pip install 'drafthouse[dash]'"
        ) from None
    counts: dict[str, int] = {}
    reading = Reading()
    try:
        for family in parser.text_string_to_metric_families(text):
            for name, labels, value, *_ in family.samples:
                if not math.isfinite(value):
                    continue  # an engine's way to say that it cannot tell
                reading.sums[name] = reading.sums.get(name, 0.0) + value
                counts[name] = counts.get(name, 0) + 1
                for label, said in labels.items():
                    reading.labels.setdefault(label, said)
                if name.endswith("_bucket") and "le" in labels:
                    bounds = reading.buckets.setdefault(name.removesuffix("_bucket"), {})
                    bound = float(labels["le"])
                    bounds[bound] = bounds.get(bound, 0.0) + value
    except (ValueError, KeyError) as error:
        raise ScrapeError(f"this is not a page of Prometheus ({error})", where=url) from None
    reading.means.update({name: total / counts[name] for name, total in reading.sums.items()})
    return reading


def quantile(share: float, before: Mapping[float, float], after: Mapping[float, float]) -> float | None:
    """The value below which `share` of the observations between two readings lie, as `histogram_quantile` of Prometheus
    estimates it: linear inside a bucket, and the last finite bound when it lies beyond. None without observations.

    Args:
        before, after: upper bound -> cumulative count; `before` may be empty.
    """
    bounds = sorted(after)
    counts = [max(0.0, after[bound] - before.get(bound, 0.0)) for bound in bounds]
    if not counts or counts[-1] <= 0 or not math.isinf(bounds[-1]):
        return None
    wanted = share * counts[-1]
    place = next(index for index, count in enumerate(counts) if count >= wanted)
    if math.isinf(bounds[place]):
        return bounds[place - 1] if place else None
    low = bounds[place - 1] if place else 0.0
    under = counts[place - 1] if place else 0.0
    inside = counts[place] - under
    return bounds[place] if inside <= 0 else low + (bounds[place] - low) * (wanted - under) / inside


def restarted(before: Reading, after: Reading, counters: Sequence[str]) -> bool:
    """True when a counter has fallen: the server was started anew."""
    return any(after.sums.get(name, 0.0) < before.sums.get(name, 0.0) for name in counters)
