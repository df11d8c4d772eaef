"""A served model, by its engine's Prometheus page (SGLang with --enable-metrics, vLLM)."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import httpx2

from drafthouse.dash.collect.scrape import TIMEOUT_S, Reading, ScrapeError, fetch, parse, quantile, restarted
from drafthouse.dash.collect.series import History
from drafthouse.dash.collect.source import Source
from drafthouse.dash.model import Known, ServerView
from drafthouse.serve.metrics import acceptance

WINDOW_S = 300.0
"""Acceptance and latencies are those of the last five minutes."""
RATE_S = 60.0
"""Tokens and requests a second are those of the last minute."""


@dataclass(frozen=True)
class Engine:
    """How an engine calls what is shown: https://docs.vllm.ai/en/latest/usage/metrics/, and SGLang's
    srt/observability/metrics_collector.py. Of several names the first that is there counts.

    `throughput`: the engine's own rate. SGLang counts tokens when their request is finished, so with long answers the
    counter stands still for minutes.
    """

    name: str
    prefix: str
    tokens: str
    throughput: str | None
    requests: tuple[str, ...]
    running: str
    waiting: str
    cache: tuple[str, ...]
    ttft: str


ENGINES = (
    Engine(
        "vllm",
        "vllm:",
        "vllm:generation_tokens_total",
        None,
        ("vllm:request_success_total",),
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "vllm:time_to_first_token_seconds",
    ),
    Engine(
        "sglang",
        "sglang:",
        "sglang:generation_tokens_total",
        "sglang:gen_throughput",
        ("sglang:num_requests_total", "sglang:e2e_request_latency_seconds_count"),
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        ("sglang:token_usage",),
        "sglang:time_to_first_token_seconds",
    ),
)
_UNITS = {
    "tokens/s": "tokens/s",
    "TTFT p50": "s",
    "TTFT p95": "s",
    "acceptance length": "tokens/pass",
    "running": "requests",
    "waiting": "requests",
}


class ServerSource(Source):
    """The server at `url`.

    Args:
        name: for people: of the job that serves, or of the settings.
        url: with or without `/v1`; its `/metrics` is read.
        job: the job that it is of.
        history_s: how long its curves are.
    """

    def __init__(self, name: str, url: str, job: str | None, pace_s: float, history_s: float) -> None:
        super().__init__(f"server {name}", pace_s)
        self.server, self.url, self.job = name, url.rstrip("/").removesuffix("/v1"), job
        # A proxy of the environment is for the outside; servers are machines of ours.
        self._client = httpx2.Client(timeout=TIMEOUT_S, trust_env=False)
        self._readings: deque[tuple[float, Reading]] = deque()
        self._history = History(_UNITS, history_s)
        self._view: ServerView | None = None

    def view(self) -> ServerView:
        """What is known of it."""
        found = self._view or ServerView(
            name=self.server, url=self.url, job=self.job, engine=None, model=None, known=Known(), up=False
        )
        known = self.known
        return found.model_copy(update={"known": known, "up": found.up and known.error is None, "job": self.job})

    def close(self) -> None:
        self._client.close()

    def look(self) -> None:
        page = f"{self.url}/metrics"
        reading = parse(fetch(self._client, page), page)
        engine = next((one for one in ENGINES if any(name.startswith(one.prefix) for name in reading.sums)), None)
        if engine is None:
            raise ScrapeError("these are not the metrics of vLLM or SGLang", where=page)
        now = time.monotonic()
        counters = (engine.tokens, *engine.requests)
        if self._readings and restarted(self._readings[-1][1], reading, counters):
            self._readings.clear()
        self._readings.append((now, reading))
        while len(self._readings) > 2 and self._readings[1][0] <= now - WINDOW_S:
            self._readings.popleft()
        values = self._values(engine, now)
        names = ("tokens_per_s", "ttft_p50_s", "ttft_p95_s", "acceptance_length", "running", "waiting")
        self._history.add(time.time(), {title: values[name] for title, name in zip(_UNITS, names, strict=True)})
        self._view = ServerView(
            name=self.server,
            url=self.url,
            job=self.job,
            engine=engine.name,
            model=reading.labels.get("model_name"),
            known=Known(),
            up=True,
            series=self._history.shown(),
            **values,
        )

    def _values(self, engine: Engine, now: float) -> dict[str, Any]:
        last = self._readings[-1][1]
        first = self._readings[0][1]
        lately, reading = next((at, one) for at, one in self._readings if at >= now - RATE_S)

        def rate(*names: str) -> float | None:
            name = next((name for name in names if name in last.sums), None)
            if name is None or now <= lately:
                return None
            return (last.sums[name] - reading.sums.get(name, 0.0)) / (now - lately)

        tokens_per_s = rate(engine.tokens) or (last.sums.get(engine.throughput) if engine.throughput else None)
        found = acceptance(first.sums, last.sums)
        before, after = first.buckets.get(engine.ttft, {}), last.buckets.get(engine.ttft, {})
        return {
            "tokens_per_s": rate(engine.tokens) if tokens_per_s is None else tokens_per_s,
            "requests_per_s": rate(*engine.requests),
            "ttft_p50_s": quantile(0.5, before, after),
            "ttft_p95_s": quantile(0.95, before, after),
            "acceptance_length": None if found is None else found.length,
            "running": last.sums.get(engine.running),
            "waiting": last.sums.get(engine.waiting),
            "cache_used": next((last.means[name] for name in engine.cache if name in last.means), None),
        }
