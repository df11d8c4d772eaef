"""SGLang's own argument resolver, asked in a child process: the last word on a launch line.

Neither a GPU nor the weights are needed, only config.json; see `resolver_child`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from drafthouse.serve.errors import ProfileError
from drafthouse.serve.facts import Facts, Resolution
from drafthouse.serve.launch import launch_line
from drafthouse.serve.profile import Profile, Sglang

DEFAULT_CAPABILITY = (8, 6)


def resolve(
    profile: Profile,
    facts: Facts,
    *,
    model: Path,
    draft: Path | None = None,
    python: str | None = None,
    timeout_s: float = 180,
) -> Resolution | None:
    """Let SGLang resolve the profile's launch line.

    Args:
        facts: name the GPU that is pretended; else the profile's hardware does.
        model, draft: folders with config.json.
        python: interpreter that has SGLang; default: the profile's.
        timeout_s: for the child, which imports torch and transformers.

    Returns:
        What it said; None where there is no interpreter with SGLang, or no launch line to judge.
    """
    engine, program = profile.engine, python or profile.engine.python
    if not isinstance(engine, Sglang) or shutil.which(program) is None:
        return None
    try:
        argv = _with_folders(launch_line(profile).argv[3:], model, draft)
    except ProfileError:
        return None
    gpu = next((gpu for gpu in facts.host.gpus or () if gpu.memory_mib), None)
    memory = gpu.memory_mib if gpu else profile.hardware.memory_mib
    if engine.device == "cuda" and memory is None:
        return None
    capability = (gpu.compute_capability if gpu else None) or profile.hardware.compute_capability or DEFAULT_CAPABILITY
    asked = {"argv": argv, "device": engine.device, "compute_capability": capability, "memory_mib": memory}
    return _ask(program, asked, profile.environment, timeout_s)


def _with_folders(argv: tuple[str, ...], model: Path, draft: Path | None) -> list[str]:
    """The line about local folders: a revision and a hub id would make SGLang look for a network."""
    words: list[str] = []
    folders = {"--model-path": str(model), "--speculative-draft-model-path": str(draft) if draft else None}
    skip = False
    for flag, value in zip(argv, (*argv[1:], ""), strict=True):
        if skip:
            skip = False
        elif flag in ("--revision", "--speculative-draft-model-revision"):
            skip = True
        elif flag in folders:
            words += [flag, folders[flag] or value]
            skip = True
        else:
            words.append(flag)
    return words


def _ask(program: str, asked: dict[str, Any], environment: dict[str, str], timeout_s: float) -> Resolution | None:
    script = files("drafthouse.serve") / "resolver_child.py"
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as elsewhere:
        try:
            done = subprocess.run(
                # -P: this folder has a profile.py, which would hide the standard library's.
                [program, "-P", str(script)],
                input=json.dumps(asked),
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
                cwd=elsewhere,
                env={**os.environ, **environment, **offline},
            )
            answer = json.loads(done.stdout.splitlines()[-1])
        except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
            return None
    return Resolution(**answer) if answer["version"] else None
