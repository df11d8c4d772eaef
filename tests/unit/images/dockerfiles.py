"""What the images are made from, as the static checks read it."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = sorted(path.parent for path in (ROOT / "images").glob("*/Dockerfile"))
NAMES = [folder.name for folder in FOLDERS]


@dataclass(frozen=True)
class Instruction:
    """One instruction, its continuation lines joined."""

    word: str
    value: str

    @property
    def argv(self) -> list[str]:
        """The words of an instruction in JSON form, options left out."""
        words: list[str] = json.loads(self.value[self.value.index("[") :])
        return words


def instructions(name: str) -> list[Instruction]:
    """Instructions of an image's Dockerfile, without comments."""
    text = (ROOT / "images" / name / "Dockerfile").read_text(encoding="utf-8")
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    joined = "\n".join(lines).replace("\\\n", " ")
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines()]


def last_stage(name: str) -> list[Instruction]:
    """Instructions of the stage that the image is."""
    every = instructions(name)
    begins = max(index for index, one in enumerate(every) if one.word == "FROM")
    return every[begins:]


def arguments(name: str) -> dict[str, str]:
    """Defaults of the build arguments that have one."""
    pairs = (one.value.partition("=") for one in instructions(name) if one.word == "ARG")
    return {key: value for key, sign, value in pairs if sign}


def pins() -> dict[str, str]:
    """Version by package of the serving image."""
    lines = (ROOT / "images/serve/requirements.txt").read_text(encoding="utf-8").splitlines()
    matches = [re.fullmatch(r"([a-z0-9-]+)==(\S+)", line) for line in lines if not line.startswith("#")]
    assert all(matches), "a line of requirements.txt is no exact version"
    return {match[1]: match[2] for match in matches if match}


def build_script() -> ModuleType:
    """docker/build.py as a module."""
    spec = spec_from_file_location("docker_build", ROOT / "docker/build.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def program(name: str, package: str) -> str:
    """Path of a command-line tool of the environment; the test is skipped where it is not installed."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (pip install {package})")
    return found
