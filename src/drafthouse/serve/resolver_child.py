"""Runs inside an interpreter that has SGLang: resolve a launch line as SGLang itself would, with no GPU.

Started by `resolver.py` as a script (never imported by this package), so it uses nothing but the standard
library and `sglang`. Standard input: `{"argv": [...], "device": "cuda"|"cpu", "compute_capability": [8, 6],
"memory_mib": 49140}`. Standard output, last line: `{"version", "resolved", "error", "unjudged"}`.

How it works without a GPU (SGLang 0.5.23): the platform object may be overridden; everything is imported once in
CPU mode because some modules look for a device while they are imported; then the memory of the GPU is told.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import sys
import traceback
from typing import Any

FIELDS = (
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_draft_model_path",
    "mamba_radix_cache_strategy",
    "mamba_ssm_dtype",
    "disable_overlap_schedule",
    "page_size",
    "attention_backend",
    "sampling_backend",
    "mem_fraction_static",
    "chunked_prefill_size",
    "max_running_requests",
    "context_length",
)


def plain(value: Any) -> Any:
    """`value` as JSON can hold it."""
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def resolve(argv: list[str]) -> dict[str, Any]:
    """What SGLang makes of `argv`; whatever it raises is let out."""
    from sglang.srt.arg_groups.overrides import resolution_result
    from sglang.srt.server_args import prepare_server_args

    arguments = prepare_server_args(argv)
    arguments.resolve_once()
    arguments.check_server_args()
    return {name: plain(resolution_result(arguments, name)) for name in FIELDS}


def pretend_cuda(capability: list[int], memory_mib: int) -> None:
    """Tell SGLang that it runs on a CUDA device of this compute capability and memory."""
    from sglang.srt import utils
    from sglang.srt.arg_groups import memory_hook
    from sglang.srt.runtime_context import override_platform

    major, minor = capability
    override_platform(
        is_cuda=True,
        is_sm90=major == 9,
        is_sm100=major == 10,
        is_sm120=major == 12,
        has_flashinfer=True,
        device_sm=major * 10 + minor,
        device_capability=(major, minor),
    ).install()
    utils.is_cuda = lambda: True
    memory_hook.get_device_memory_capacity = lambda device=None: memory_mib


def main() -> None:
    asked = json.loads(sys.stdin.read())
    answer: dict[str, Any] = {"version": None, "resolved": None, "error": None, "unjudged": None}
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            answer["version"] = importlib.metadata.version("sglang")
            if asked["device"] == "cuda":
                model = asked["argv"][asked["argv"].index("--model-path") + 1]
                on_cpu = ["--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"]
                resolve(["--model-path", model, "--device", "cpu", *on_cpu])
                pretend_cuda(asked["compute_capability"], asked["memory_mib"])
            argv = asked["argv"]
            # SGLang looks for an accelerator unless it is told which one there is.
            answer["resolved"] = resolve(argv if "--device" in argv else [*argv, "--device", asked["device"]])
    except SystemExit:
        # argparse has printed why: its last line is the message.
        lines = [line for line in said.getvalue().splitlines() if line.strip()]
        answer["error"] = f"argument parser: {lines[-1] if lines else 'refused'}"
    except Exception as error:
        # SGLang's bare assertions say nothing but where they stand.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
        message = " ".join(str(error).split())
        sentence = f"{type(error).__name__}{f': {message}' if message else ''} ({place})"
        # An error of torch or a kernel library only says that there is no GPU here: no verdict on the line.
        answer["error" if "/sglang/" in frame.filename else "unjudged"] = sentence
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
