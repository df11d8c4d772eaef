"""Facts that preflight judges: a typed snapshot of a model folder, a draft folder, a node and its engine.

Everything is optional. None means "not known" and makes preflight say what it could not check; an empty tuple or
False means "looked, and there is none". Snapshots are plain JSON, so a node can be judged from anywhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field

from drafthouse.config import Settings, validate
from drafthouse.errors import ConfigError
from drafthouse.serve.errors import FactsError


class Tensor(Settings):
    """One tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str = Field(description="as safetensors spells it: BF16, F32, F8_E4M3, …")
    bytes: int = Field(ge=0)


class FolderFacts(Settings):
    """A model or drafter folder."""

    config: dict[str, Any] | None = Field(None, description="config.json; none: not read")
    problem: str | None = Field(None, description="why the folder cannot be read, as a sentence")
    tensor_names: tuple[str, ...] | None = Field(None, description="of all weight files")
    tensors: dict[str, Tensor] | None = Field(None, description="shapes, where the headers could be read")
    weight_bytes: int | None = Field(None, ge=0)
    missing_files: tuple[str, ...] = Field((), description="weight files that the index names and the folder lacks")
    rewritten: tuple[str, ...] | None = Field(
        None, description="keys that transformers' own config class changes when it reads and writes config.json"
    )


class Gpu(Settings):
    """One GPU as nvidia-smi prints it; memory in MiB."""

    name: str
    memory_mib: int | None = None
    free_mib: int | None = None
    compute_capability: tuple[int, int] | None = None


class HostFacts(Settings):
    """A node."""

    gpus: tuple[Gpu, ...] | None = None
    driver: str | None = None
    p2p: bool | None = Field(None, description="every pair of GPUs can read each other's memory")
    nvlink: bool | None = Field(None, description="every pair of GPUs is joined by NVLink")
    shm_bytes: int | None = Field(None, description="size of /dev/shm where the server runs")
    memlock_bytes: int | None = Field(None, description="limit of locked memory; -1: unlimited")
    glibc: str | None = None
    libavutil: tuple[int, ...] | None = Field(None, description="major versions of FFmpeg's libavutil")
    nvcc: str | None = Field(None, description="version of the CUDA compiler that kernels are built with at run time")


class EngineFacts(Settings):
    """The environment that the engine is installed in."""

    version: str | None = None
    packages: dict[str, str] | None = Field(None, description="installed distributions, names in lower case")
    torchcodec: str | None = Field(None, description="'ok', 'absent', or the error that importing it raises")
    uv: str | None = Field(None, description="version of uv that installs it, where uv does")


class Resolution(Settings):
    """What SGLang's own argument resolver made of the launch line."""

    version: str
    resolved: dict[str, Any] | None = None
    error: str | None = Field(None, description="why it refuses")
    unjudged: str | None = Field(None, description="why it cannot tell without a GPU")


class Facts(Settings):
    """All that is known before a launch."""

    model: FolderFacts | None = None
    draft: FolderFacts | None = None
    host: HostFacts = Field(default_factory=HostFacts)
    engine: EngineFacts = Field(default_factory=EngineFacts)
    resolution: Resolution | None = None


def read_facts(path: Path) -> Facts:
    """A snapshot that was written as JSON.

    Raises:
        FactsError: the file is missing, no JSON, or has an unknown key.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FactsError("there is no such file of facts", where=str(path), fix="check the path") from None
    except (OSError, ValueError) as error:
        raise FactsError(f"not readable as JSON ({error})", where=str(path), fix="write it again") from None
    try:
        return validate(Facts, values, str(path))
    except ConfigError as error:
        raise FactsError(error.what, where=error.where, fix=error.fix) from None


def write_facts(facts: Facts, path: Path) -> None:
    """Keep a snapshot as JSON, for `read_facts` on another machine.

    Raises:
        FactsError: the file cannot be written.
    """
    try:
        path.write_text(facts.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise FactsError(
            f"the facts cannot be written ({error.strerror})", where=str(path), fix="choose another file"
        ) from None


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config.json: multimodal wrappers nest it."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def architecture(config: dict[str, Any]) -> str:
    """First name under `architectures`; empty where there is none."""
    names = config.get("architectures") or [""]
    return str(names[0])


def layer_types(config: dict[str, Any]) -> tuple[str, ...] | None:
    """`linear_attention` or `full_attention` per layer of a hybrid; None where the config does not say."""
    text = text_config(config)
    given = text.get("layer_types")
    if given:
        return tuple(given)
    layers, interval = text.get("num_hidden_layers"), text.get("full_attention_interval")
    if layers and interval:
        return tuple("full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers))
    return None


def is_hybrid(config: dict[str, Any]) -> bool:
    """True for Gated-DeltaNet hybrids: some layers keep a recurrent state instead of a cache that grows."""
    return "linear_attention" in (layer_types(config) or ())
