"""SGLang servers as child processes: launched by the line of a serving profile, asked until ready, and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2

from drafthouse.serve.launch import launch_line
from drafthouse.serve.profile import Profile

VERSION = "0.5.17"
# One GPU holds several such servers: the pools are capped, so the memory fraction is a ceiling only. What the bundle
# leaves out (FlashAttention's kernels, grammars, the flashinfer sampler) is not asked for.
EXTRA: dict[str, Any] = {
    "mm-attention-backend": "triton_attn",
    "mm-feature-transport": "cpu",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "max-total-tokens": 65_536,
    "skip-server-warmup": True,
}


def profile_of(
    name: str,
    model: Path,
    port: int,
    *,
    python: str,
    draft: Path | None = None,
    capture: bool = False,
    states: bool = False,
    questions: Sequence[Mapping[str, Any]] = (),
) -> Profile:
    """The serving profile of one server of the gate.

    Args:
        draft: a drafter's folder, for DFLASH.
        capture, states: hand out hidden states as JSON, or write them by our plug-in; a cached prefix would have
            none, so there is no prefix cache then.
        questions: of the canary.
    """
    engine: dict[str, Any] = {
        "name": "sglang",
        "version": VERSION,
        "python": python,
        "attention_backend": "triton",
        "mem_fraction_static": 0.6,
        "max_mamba_cache_size": 64,
        "prefill_graph": "disabled",
        "decode_graph_max_batch": 8,
        "extra_args": EXTRA | ({"enable-return-hidden-states": True} if capture else {}),
    }
    if capture or states:
        engine["radix_cache"] = False
    else:
        engine["mamba_radix_cache_strategy"] = "extra_buffer"
    asked = [dict(question) for question in questions] or [{"prompt": "?", "answers": ["?"]}]
    return Profile.model_validate(
        {
            "name": name,
            "model": {"path": str(model), "served_name": name, "dtype": "bfloat16"},
            "engine": engine,
            "hardware": {"gpu": "NVIDIA H200", "gpus": 1},
            "port": port,
            "context_length": 4096,
            "max_running_requests": 8,
            "speculation": {"method": "none"} if draft is None else {"method": "dflash", "draft": {"path": str(draft)}},
            "canary": {
                "questions": asked,
                # Another engine rounds otherwise: one answer of four may part at a near-tie.
                "min_right": 0.75,
                "json_schema": False,
                "resume_words": 0,
                "timeout_s": 60,
            },
        }
    )


class Server:
    """One server process with its log; it leads a process group of its own, which is ended with it."""

    def __init__(self, profile: Profile, logs: Path, more: Mapping[str, str] | None = None) -> None:
        line = launch_line(profile)
        self.profile, self.log = profile, logs / f"{profile.name}.log"
        self.url = profile.address
        self.began = time.monotonic()
        self.ready_s: float | None = None
        with self.log.open("w") as stream:
            self._process = subprocess.Popen(
                line.argv,
                env={**os.environ, **line.env, **(more or {})},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                cwd=logs,  # nothing that lies where we were started is a module there
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def why(self) -> str:
        """The last line of the log that says what went wrong, else its last line."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        wrong = [line for line in lines if "Error" in line or "Exception" in line or "error:" in line]
        said = (wrong or lines or ["it printed nothing"])[-1][:300]
        return f"still starting ({said})" if self.alive else said

    def wait(self, until: float) -> None:
        """Ask /health, which generates a token, until it answers, the server dies, or `until` (monotonic s) comes."""
        while self.alive and self.ready_s is None and (left := until - time.monotonic()) > 0:
            with suppress(httpx2.HTTPError):
                if httpx2.get(f"{self.url}/health", timeout=min(30.0, left), trust_env=False).status_code == 200:
                    self.ready_s = time.monotonic() - self.began
                    return
            time.sleep(0.5)

    def stop(self) -> None:
        """End the server and all that it started; a second call does nothing."""
        for sign, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 10.0)):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, sign)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)


def wait_ready(servers: Sequence[Server], until: float) -> None:
    """Wait for all side by side: one that compiles its kernels keeps a request waiting for half a minute."""
    threads = [Thread(target=server.wait, args=(until,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
