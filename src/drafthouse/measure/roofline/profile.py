"""From a serving profile, as plain YAML, to what the roofline asks for: model, hardware, serving, drafter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from drafthouse.config import read_yaml
from drafthouse.measure.roofline.errors import RooflineError
from drafthouse.measure.roofline.serving import CacheType, WeightType
from drafthouse.measure.roofline.shapes import Config

# Hub names (without their owner, lower case) whose shape this package knows; releases 3.5 to 3.8 share one.
KNOWN_MODELS = {f"qwen3.{minor}-27b": "qwen3.6-27b.json" for minor in (5, 6, 8)}
KNOWN_DRAFTERS = {"qwen3.6-27b-dflash": "qwen3.6-27b-dflash.json"}
_QUANTISED: Mapping[str, WeightType] = {
    "fp8": "fp8",
    "w8a8_fp8": "fp8",
    "w8a8_int8": "int8",
    "awq": "int4",
    "awq_marlin": "int4",
    "gptq": "int4",
    "gptq_marlin": "int4",
    "nvfp4": "nvfp4",
    "modelopt_fp4": "nvfp4",
    "mxfp4": "mxfp4",
}
_CACHES: Mapping[str, CacheType] = {kind: kind for kind in ("float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2")}
_TYPICAL_CONTEXT = 4096


@dataclass(frozen=True)
class Plan:
    """What a roofline is asked for.

    Attributes:
        hardware: a name of the table, or "probe".
        link: "pcie" or "nvlink" where the profile says which; None where the table's own choice stands.
        serving: settings for `Serving`.
        served: the model's name, for people.
    """

    served: str
    model: Config
    hardware: str
    serving: dict[str, Any] = field(default_factory=dict)
    drafter: Config | None = None
    link: str | None = None


def read_profile(name: str, folder: Path) -> Mapping[str, Any]:
    """A profile by its name in `folder`, or by the path of its file.

    Raises:
        RooflineError: there is none (the sentence lists those that are), or it is not a mapping.
    """
    path = Path(name) if name.endswith((".yml", ".yaml")) else folder / f"{name}.yml"
    try:
        profile = read_yaml(path.read_text(encoding="utf-8"))
    except OSError:
        known = ", ".join(sorted(file.stem for file in folder.glob("*.yml"))) or "none"
        raise RooflineError(
            f"no profile is called '{name}'", where=str(folder), fix=f"choose one of those there: {known}"
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        line = " ".join(str(error).split())
        raise RooflineError(f"not valid YAML ({line})", where=str(path), fix="correct the file") from None
    if not isinstance(profile, Mapping):
        raise RooflineError("a profile is a mapping of keys", where=str(path), fix="see inventory/profiles/")
    return profile


def plan_of(profile: Mapping[str, Any], where: str = "the profile") -> Plan:
    """What the fields of a profile mean for a decode step.

    Raises:
        RooflineError: a field is missing, or the shape of model or drafter is not known.
    """
    model, engine = _section(profile, "model", where), _section(profile, "engine", where)
    hardware, speculation = _section(profile, "hardware", where), profile.get("speculation") or {}
    path = str(model.get("path") or "")
    config, quantised = model_config(path)
    extra = engine.get("extra_args") or {}
    method = str(speculation.get("method") or "none")
    serving: dict[str, Any] = {
        "tensor_parallel": int(profile.get("tensor_parallel") or 1),
        "context": min(_TYPICAL_CONTEXT, int(profile.get("context_length") or _TYPICAL_CONTEXT)),
        "weights": quantised or _QUANTISED.get(str(extra.get("quantization"))) or _weights(model.get("dtype")),
        "kv_cache": _CACHES.get(str(engine.get("kv_cache_dtype"))),
        "state": engine.get("mamba_ssm_dtype"),
        "draft": method,
    }
    if method in ("mtp", "eagle3"):
        serving["steps"] = speculation.get("steps")
        serving["tree"] = (speculation.get("topk") or 1) > 1
    if method != "none":
        serving["width"] = speculation.get("draft_tokens") or speculation.get("block_size")
    draft = speculation.get("draft") or {}
    on_cpu = engine.get("device") == "cpu" or str(hardware.get("gpu")).casefold() == "cpu"
    return Plan(
        served=path.rstrip("/").rsplit("/", 1)[-1],
        model=config,
        hardware="probe" if on_cpu else str(hardware.get("gpu") or "probe"),
        serving={key: value for key, value in serving.items() if value is not None},
        drafter=drafter_config(str(draft.get("path") or "")) if draft else None,
        link="nvlink" if hardware.get("nvlink") else None,
    )


def model_config(path: str) -> tuple[Config, WeightType | None]:
    """config.json of a model folder, of 'embedded', or of a known hub id; and the type of its quantised weights.

    Raises:
        RooflineError: neither a folder with config.json nor a known name.
    """
    if path == "embedded":
        return _parse(_packaged("config.json", "drafthouse.target", "embedded"), path)
    if (found := _local(path)) is not None:
        return found
    name = path.rsplit("/", 1)[-1].casefold()
    for known, file in KNOWN_MODELS.items():
        suffix = name.removeprefix(f"{known}-")
        if name == known or (suffix != name and suffix in _QUANTISED):
            return _parse(_packaged(file), file)[0], None if name == known else _QUANTISED[suffix]
    raise RooflineError(
        f"the shape of model '{path}' is not known",
        where="--model",
        fix=f"give a folder with config.json, 'embedded', or one of {', '.join(KNOWN_MODELS)} (also with -fp8, -nvfp4)",
    )


def drafter_config(path: str) -> Config:
    """config.json of a drafter's folder or of a known hub id.

    Raises:
        RooflineError: neither.
    """
    if (found := _local(path)) is not None:
        return found[0]
    if file := KNOWN_DRAFTERS.get(path.rsplit("/", 1)[-1].casefold()):
        return _parse(_packaged(file), file)[0]
    raise RooflineError(
        f"the shape of drafter '{path}' is not known",
        where="--drafter",
        fix=f"give a folder with config.json, or one of {', '.join(KNOWN_DRAFTERS)}",
    )


def _local(path: str) -> tuple[Config, WeightType | None] | None:
    file = Path(path) if path.endswith(".json") else Path(path or "absent") / "config.json"
    try:
        return _parse(file.read_text(encoding="utf-8"), str(file))
    except OSError:
        return None


def _parse(text: str, where: str) -> tuple[Config, WeightType | None]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise RooflineError(f"not valid JSON ({error})", where=where, fix="correct the file") from None
    if not isinstance(config, Mapping):
        raise RooflineError("a config.json is an object", where=where, fix="correct the file")
    method = config.get("quantization_config")
    if not isinstance(method, Mapping):
        return config, None
    name = str(method.get("quant_method", "")).casefold()
    kind = _QUANTISED.get(name)
    if kind == "int4" and method.get("bits") == 8:
        kind = "int8"
    if kind is None:
        raise RooflineError(
            f"the bytes of quantisation '{name}' are not known",
            where=where,
            fix="remove quantization_config from a copy of the file and give --set weights=…",
        )
    return config, kind


def _packaged(file: str, package: str = __package__, folder: str = "models") -> str:
    return resources.files(package).joinpath(folder, file).read_text(encoding="utf-8")


def _weights(dtype: object) -> str:
    return str(dtype) if dtype in ("float32", "float16") else "bfloat16"


def _section(profile: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = profile.get(key)
    if not isinstance(value, Mapping):
        raise RooflineError(f"has no section '{key}'", where=where, fix="see inventory/profiles/ for a whole profile")
    return value
