"""The load generators: how each is asked for one point, and what its result file says.

* guidellm (vllm-project, Apache-2.0), options and report of 0.8: one scenario file in, one JSON report out.
* aiperf (NVIDIA, Apache-2.0), options and export of 0.13: flags in, `profile_export_aiperf.json` out. It needs no
  torch.

guidellm ends with exit code 0 even when every request has failed; aiperf ends with 1 then and leaves no export. Nothing
here believes an exit code: requests are counted in the result file, and what is missing there counts
as failed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from drafthouse.serve.sweep_plan import Load, Place, SweepError, Target
from drafthouse.serve.sweep_result import Measured, Percentiles

GeneratorName = Literal["guidellm", "aiperf"]
_AIPERF_RESULT = "profile_export_aiperf.json"
_GUIDELLM_RESULT = "guidellm.json"


@dataclass(frozen=True)
class Generator:
    """A load generator of this machine."""

    name: GeneratorName
    program: Path

    def command(self, target: Target, load: Load, place: Place, folder: Path) -> list[str]:
        """The command that measures one point and leaves its result in `folder`, which exists."""
        return [str(self.program), *_COMMANDS[self.name](target, load, place, folder)]

    def read(self, folder: Path, asked: int) -> Measured:
        """What was measured; every request that the result does not show as answered counts as failed.

        Raises:
            SweepError: there is no result, or it is not of the release that is known here.
        """
        path = folder / (_GUIDELLM_RESULT if self.name == "guidellm" else _AIPERF_RESULT)
        try:
            return _READERS[self.name](json.loads(path.read_text(encoding="utf-8")), asked)
        except OSError:
            raise SweepError(f"{self.name} left no result", where=str(path), fix=f"see {folder / 'log.txt'}") from None
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise SweepError(
                f"the result of {self.name} has another form than that of the known release ({error!r})",
                where=str(path),
                fix="install guidellm 0.8 or aiperf 0.13",
            ) from None


def find_generator(name: GeneratorName | None = None, program: Path | None = None) -> Generator:
    """The generator that was asked for, or the first that is installed: beside this Python, or on the PATH.

    Args:
        program: its console script; its file name tells which one it is when `name` is None.

    Raises:
        SweepError: there is none, or the program is none of the two.
    """
    names: Sequence[GeneratorName] = (name,) if name else ("guidellm", "aiperf")
    if program is not None:
        matching = [one for one in names if name or program.name == one]
        if not matching or not os.access(program, os.X_OK) or program.is_dir():
            raise SweepError(
                "is no program of a known load generator",
                where=str(program),
                fix="give the console script guidellm or aiperf of the environment that has it",
            )
        return Generator(matching[0], program.absolute())
    beside = str(Path(sys.executable).parent)
    for one in names:
        if found := shutil.which(one, path=os.pathsep.join((beside, os.environ.get("PATH", "")))):
            return Generator(one, Path(found))
    raise SweepError(
        f"{' or '.join(names)} is not installed",
        where="sweep",
        fix="pip install 'drafthouse[bench]', or install it in an environment of its own and give --program",
    )


def environment(target: Target, outer: Mapping[str, str]) -> dict[str, str]:
    """The generator's environment: the server is never asked through a proxy, and nothing is reported home."""
    host = urlsplit(target.url).hostname or ""
    spared = ",".join(filter(None, (outer.get("NO_PROXY") or outer.get("no_proxy", ""), host)))
    return {**outer, "NO_PROXY": spared, "no_proxy": spared, "HF_HUB_DISABLE_TELEMETRY": "1"}


def _guidellm(target: Target, load: Load, place: Place, folder: Path) -> list[str]:
    spec = {
        "backend": {
            "kind": "openai_http",
            "target": target.url,
            "model": target.model,
            "request_format": "/v1/chat/completions",
            "extras": {"body": {"temperature": 0, "max_tokens": load.output_tokens, "ignore_eos": True}},
            # One connection for all requests would make the client the bottleneck.
            "http2": False,
            "timeout": load.limit_s,
        },
        "profile": {"kind": "concurrent", "streams": [place.concurrency]},
        "constraints": [{"kind": "max_requests", "count": place.requests(load)}],
        "tokenizer": {"kind": "huggingface_auto", "model": target.tokenizer},
        "data": [
            {"kind": "synthetic_text", "prompt_tokens": place.context, "output_tokens": load.output_tokens},
        ],
        "seed": {"kind": "static", "value": place.seed(load)},
        "outputs": [{"kind": "json", "path": str(folder / _GUIDELLM_RESULT)}],
        # Nobody reads the single requests, and a hundred prompts of 120K tokens would be kept.
        "metrics": {"kind": "generative", "sample_size": 0},
    }
    scenario = folder / "scenario.json"
    scenario.write_text(json.dumps({"spec": spec}, indent=1), encoding="utf-8")
    return ["run", "--config", str(scenario)]


def _aiperf(target: Target, load: Load, place: Place, folder: Path) -> list[str]:
    requests = place.requests(load)
    options: dict[str, Any] = {
        "--model": target.model,
        "--url": target.url,
        "--endpoint-type": "chat",
        "--tokenizer": target.tokenizer,
        "--concurrency": place.concurrency,
        "--request-count": requests,
        "--num-dataset-entries": requests,
        "--isl": place.context,
        "--isl-stddev": 0,
        "--osl": load.output_tokens,
        "--osl-stddev": 0,
        "--random-seed": place.seed(load),
        "--request-timeout-seconds": load.limit_s,
        "--output-artifact-dir": folder,
        "--export-level": "summary",
        "--ui": "none",
    }
    words = [word for name, value in options.items() for word in (name, str(value))]
    words += ["--streaming", "--use-server-token-count", "--use-legacy-max-tokens"]
    words += ["--no-server-metrics", "--no-gpu-telemetry"]
    extra = {"temperature": 0, "ignore_eos": True, "min_tokens": load.output_tokens}
    return ["profile", *words, "--extra-inputs", json.dumps(extra)]


def _read_guidellm(report: Any, asked: int) -> Measured:
    metrics = report["benchmarks"][0]["metrics"]
    answered = int(metrics["request_totals"]["successful"])
    errored = int(metrics["request_totals"]["errored"])

    def times(name: str) -> Percentiles | None:
        found = metrics[name]["successful"]
        if not answered or not found["count"]:
            return None
        return Percentiles(**{key: found["percentiles"][key] for key in Percentiles.model_fields})

    def mean(name: str) -> float | None:
        return float(metrics[name]["successful"]["mean"]) if answered else None

    return Measured(
        asked=asked,
        failed=max(0, asked - answered),
        tokens_per_s=mean("output_tokens_per_second") or 0,
        ttft_ms=times("time_to_first_token_ms"),
        inter_token_ms=times("inter_token_latency_ms"),
        input_tokens=mean("prompt_token_count"),
        output_tokens=mean("output_token_count"),
        reason=f"guidellm counts {errored} errors" if errored else None,
        made_by=f"guidellm {report['metadata']['guidellm_version']}",
    )


def _read_aiperf(export: Any, asked: int) -> Measured:
    def average(name: str) -> float | None:
        found = export.get(name)
        return None if found is None or found["avg"] is None else float(found["avg"])

    def times(name: str) -> Percentiles | None:
        found = export.get(name)
        if found is None or found["p50"] is None:
            return None
        return Percentiles(**{key: found[key] for key in Percentiles.model_fields})

    answered = int(average("request_count") or 0)
    errors = export.get("error_summary") or []
    cut = "the run was cut short" if export.get("was_cancelled") else None
    return Measured(
        asked=asked,
        failed=max(0, asked - answered),
        tokens_per_s=average("output_token_throughput") or 0,
        ttft_ms=times("time_to_first_token"),
        inter_token_ms=times("inter_token_latency"),
        input_tokens=average("input_sequence_length"),
        output_tokens=average("output_sequence_length"),
        reason=_first_error(errors[0]) if errors else cut,
        made_by=f"aiperf {export['aiperf_version']}",
    )


def _first_error(entry: Any) -> str:
    details = entry["error_details"]
    said = " ".join(str(details.get("message") or details.get("type") or "unnamed").split())
    return f"{said[:200]} ({entry['count']} times)"


_COMMANDS: Mapping[GeneratorName, Callable[[Target, Load, Place, Path], list[str]]] = {
    "guidellm": _guidellm,
    "aiperf": _aiperf,
}
_READERS: Mapping[GeneratorName, Callable[[Any, int], Measured]] = {
    "guidellm": _read_guidellm,
    "aiperf": _read_aiperf,
}
