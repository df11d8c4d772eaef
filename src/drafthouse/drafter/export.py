"""A drafter on disk: config.json and model.safetensors in the layout that SGLang and vLLM load.

config.json is written as an explicit dictionary, never through a transformers config object: Qwen3Config
nulls `sliding_window` when `use_sliding_window` is absent and drops what equals its defaults. Both files are
read back and compared before the folder takes its final name. SGLang skips tensors that it does not know, so
names and shapes are checked here, on writing and on reading.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from drafthouse.config import differences
from drafthouse.drafter.config import DrafterConfig
from drafthouse.drafter.durable import replace_folder, sync
from drafthouse.drafter.model import DFlashDrafter
from drafthouse.errors import DrafterError

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def save_drafter(
    directory: Path,
    model: DFlashDrafter,
    *,
    dtype: torch.dtype = torch.bfloat16,
    trained: Mapping[str, Any] | None = None,
) -> Path:
    """Write a drafter; `directory` is replaced as a whole or left as it was.

    Args:
        directory: final folder.
        model: its config goes along.
        dtype: of the stored weights, bfloat16 or float32.
        trained: how it came about (steps, tokens, seed, digests), kept under `drafthouse.trained`.

    Returns:
        `directory`.

    Raises:
        DrafterError: something else lies there, the disk is full, or what was read back is not what was meant.
    """
    check_replaceable(directory)
    intended = model.config.to_hf_dict(_DTYPES[dtype])
    if trained:
        intended.setdefault("drafthouse", {})["trained"] = dict(trained)
    new = directory.with_name(directory.name + ".new")
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        weights = {name: t.detach().to("cpu", dtype).contiguous() for name, t in model.state_dict().items()}
        save_file(weights, new / WEIGHTS, metadata={"format": "pt"})
        (new / CONFIG).write_text(json.dumps(intended, indent=2) + "\n", encoding="utf-8")
        # safetensors writes for its owner alone; an engine often runs as somebody else.
        (new / WEIGHTS).chmod((new / CONFIG).stat().st_mode)
        compare_config(intended, read_config(new), where=str(directory / CONFIG))
        check_tensors(new / WEIGHTS, model.config)
        for name in (WEIGHTS, CONFIG):
            sync(new / name)
        replace_folder(new, directory)
    except (OSError, SafetensorError) as error:
        raise DrafterError(
            f"the drafter cannot be written ({error})", where=str(directory), fix="make room and try again"
        ) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return directory


def check_replaceable(directory: Path) -> None:
    """Raise DrafterError when writing a drafter to `directory` would replace something that is not one."""
    foreign: str | None = None
    if directory.is_dir():
        foreign = next((f.name for f in sorted(directory.iterdir()) if f.name not in {CONFIG, WEIGHTS}), None)
    if foreign is not None or (directory.exists() and not directory.is_dir()):
        held = f"this folder holds '{foreign}'" if foreign is not None else "this is a file"
        raise DrafterError(
            f"{held}, and a drafter replaces what lies there", where=str(directory), fix="give a folder of its own"
        )


def load_drafter(
    directory: Path,
    *,
    target_identity: str | None = None,
    num_layers: int | None = None,
    hidden_size: int | None = None,
    vocab_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> DFlashDrafter:
    """Read a drafter, ours or a published one of the same layout.

    Args:
        directory: holds config.json and model.safetensors.
        target_identity, num_layers, hidden_size, vocab_size: facts of the target it is meant for; what is
            given must match. A drafter that names no target (made elsewhere) is judged by the other three.
        dtype: of the weights in memory.
        device: where to.

    Raises:
        DrafterError: the folder is incomplete or damaged (also by weights that are no numbers), or the drafter belongs
            to another target.
    """
    raw = read_config(directory)
    config = DrafterConfig.from_hf_dict(raw, where=str(directory / CONFIG))
    facts = {
        "decoder layers": (config.num_target_layers, num_layers),
        "hidden size": (config.hidden_size, hidden_size),
        "vocabulary": (config.vocab_size, vocab_size),
        "identity": (config.target_identity, target_identity),
    }
    for fact, (own, wanted) in facts.items():
        if own and wanted and own != wanted:
            short = (str(own)[:12], str(wanted)[:12])
            raise DrafterError(
                f"drafter of another target: its {fact} is {short[0]}, this target's is {short[1]}",
                where=str(directory),
                fix="train or fetch the drafter of this target",
            )
    check_tensors(directory / WEIGHTS, config)
    with torch.device("meta"):
        model = DFlashDrafter(config)
    weights = {name: t.to(dtype) for name, t in load_file(directory / WEIGHTS, device=str(device)).items()}
    broken = [name for name, tensor in weights.items() if not bool(tensor.isfinite().all())]
    if broken:  # it would load and run, and no draft would ever be accepted
        raise DrafterError(
            f"weights that are no numbers (NaN or infinite) in {len(broken)} of {len(weights)} tensors: {broken[0]}",
            where=str(directory / WEIGHTS),
            fix="export an earlier checkpoint, or copy the file again",
        )
    model.load_state_dict(weights, strict=True, assign=True)
    return model.eval()


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a drafter folder.

    Raises:
        DrafterError: missing or not a JSON object.
    """
    where = str(directory / CONFIG)
    try:
        value = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DrafterError("there is no drafter here", where=where, fix="check the path") from None
    except (ValueError, OSError) as error:
        raise DrafterError(f"not valid JSON ({error})", where=where, fix="export the drafter again") from None
    if not isinstance(value, dict):
        raise DrafterError("not a JSON object", where=where, fix="export the drafter again")
    return value


def compare_config(intended: Mapping[str, Any], found: Mapping[str, Any], where: str) -> None:
    """Refuse a config that is not exactly the intended one, naming each key that was changed, dropped or
    added.

    Raises:
        DrafterError: e.g. after another program wrote the file anew and nulled `sliding_window`.
    """
    changed = differences(dict(intended), dict(found))
    if changed:
        raise DrafterError(
            f"config.json does not say what was meant ({'; '.join(changed)})",
            where=where,
            fix="do not write it through a transformers config class",
        )


def check_tensors(path: Path, config: DrafterConfig) -> None:
    """Refuse weights whose names or shapes are not exactly those of `config`.

    Raises:
        DrafterError: the file is missing or cut short, or a tensor is missing, unknown or of another shape.
    """
    with torch.device("meta"):
        expected = {name: tuple(t.shape) for name, t in DFlashDrafter(config).state_dict().items()}
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise DrafterError("the weights are missing", where=str(path), fix="export the drafter again") from None
    except (SafetensorError, OSError) as error:
        raise DrafterError(
            f"the weights are damaged or cut short ({error})", where=str(path), fix="copy the file again"
        ) from None
    missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    wrong = None
    if missing or unknown:
        parts = [f"lacks {', '.join(missing)}"] if missing else []
        parts += [f"has unknown {', '.join(unknown)}"] if unknown else []
        wrong = f"the checkpoint {' and '.join(parts)}"
    else:
        for name, shape in expected.items():
            if found[name] != shape:
                wrong = f"{name} has shape {list(found[name])}, the config says {list(shape)}"
                break
    if wrong:
        raise DrafterError(wrong, where=str(path), fix="export the drafter again")
