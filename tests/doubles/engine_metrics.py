"""A test double of an engine's Prometheus page: vLLM's or SGLang's names and labels, with counters that a test moves.

Names, labels and forms are those of vLLM 0.32's CPU build and of SGLang 0.5.17 with --enable-metrics; what the page
does not read is left out, but for some that could be taken for what it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Literal

from tests.doubles.loopback import serving

BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass
class EngineDouble:
    """What the engine has done so far; a test changes it between two readings."""

    engine: Literal["vllm", "sglang", "other"] = "vllm"
    model: str = "qwen"
    tokens: float = 0
    requests: float = 0
    drafts: float = 0
    accepted: float = 0
    verify_calls: float = 0
    running: float = 0
    waiting: float = 0
    cache: float = 0
    throughput: float = 0
    first_tokens: list[float] = field(default_factory=list)
    status: int = 200
    body: bytes | None = None
    url: str = ""

    def answer(self, seconds_to_first: float, tokens: int, rounds: int) -> None:
        """One request was answered: `rounds` verify passes made its tokens, the first of which came from prefill."""
        self.requests += 1
        self.tokens += tokens
        self.first_tokens.append(seconds_to_first)
        self.drafts += rounds
        self.accepted += tokens - 1 - rounds
        self.verify_calls += rounds

    def page(self) -> str:
        """The page as it stands."""
        if self.engine == "other":
            return "# TYPE process_cpu_seconds_total counter\nprocess_cpu_seconds_total 3\n"
        return self._vllm() if self.engine == "vllm" else self._sglang()

    def _histogram(self, name: str, labels: str) -> str:
        lines = [f"# HELP {name} Histogram of time to first token in seconds.", f"# TYPE {name} histogram"]
        for bound in (*BOUNDS, float("inf")):
            count = float(sum(value <= bound for value in self.first_tokens))
            lines.append(f'{name}_bucket{{{labels},le="{"+Inf" if bound == float("inf") else bound}"}} {count}')
        lines += [f"{name}_count{{{labels}}} {float(len(self.first_tokens))}"]
        lines += [f"{name}_sum{{{labels}}} {sum(self.first_tokens)}"]
        return "\n".join(lines) + "\n"

    def _vllm(self) -> str:
        labels = f'engine="0",model_name="{self.model}"'

        def one(kind: str, name: str, value: float, more: str = "") -> str:
            return f"# HELP vllm:{name} Of vLLM.\n# TYPE vllm:{name} {kind}\nvllm:{name}{{{labels}{more}}} {value}\n"

        return (
            one("gauge", "num_requests_running", self.running)
            + one("gauge", "num_requests_waiting", self.waiting)
            + one("gauge", "kv_cache_usage_perc", self.cache)
            + one("counter", "generation_tokens_total", self.tokens)
            + one("gauge", "generation_tokens_created", 1.796024790498389e09)
            + one("counter", "request_success_total", self.requests, ',finished_reason="stop"')
            + f'vllm:request_success_total{{{labels},finished_reason="abort"}} 0.0\n'
            + one("counter", "spec_decode_num_drafts_total", self.drafts)
            + one("counter", "spec_decode_num_draft_tokens_total", 7 * self.drafts)
            + one("counter", "spec_decode_num_accepted_tokens_total", self.accepted)
            + one("counter", "spec_decode_num_accepted_tokens_per_pos_total", self.accepted, ',position="0"')
            + self._histogram("vllm:time_to_first_token_seconds", labels)
        )

    def _sglang(self) -> str:
        labels = f'engine_type="unified",model_name="{self.model}",pp_rank="0",tp_rank="0"'

        def one(kind: str, name: str, value: float) -> str:
            return f"# HELP sglang:{name} Of SGLang.\n# TYPE sglang:{name} {kind}\nsglang:{name}{{{labels}}} {value}\n"

        return (
            one("gauge", "num_running_reqs", self.running)
            + one("gauge", "num_queue_reqs", self.waiting)
            + one("gauge", "token_usage", self.cache)
            + one("gauge", "gen_throughput", self.throughput)
            + one("gauge", "spec_accept_length", 9.0)
            + one("counter", "spec_verify_calls_total", self.verify_calls)
            + one("counter", "generation_tokens_total", self.tokens)
            + one("counter", "num_requests_total", self.requests)
            + self._histogram("sglang:time_to_first_token_seconds", labels)
            + self._histogram("sglang:e2e_request_latency_seconds", labels)
        )


@contextmanager
def engine_double(engine: Literal["vllm", "sglang", "other"] = "vllm") -> Iterator[EngineDouble]:
    """Serve on a free loopback port until the block ends."""
    double = EngineDouble(engine)
    with serving(_Handler, double) as double.url:
        yield double


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        return None

    def do_GET(self) -> None:
        double: EngineDouble = self.server.double  # type: ignore[attr-defined]
        body = double.body if double.body is not None else double.page().encode()
        self.send_response(double.status if self.path == "/metrics" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
