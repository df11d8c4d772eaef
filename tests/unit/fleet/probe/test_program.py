"""The parts of the probe that read what a node has; the rest is tried on nodes."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from drafthouse.fleet.probe import program

GPUS = """\
0, GPU-aa, NVIDIA RTX A6000, 00000000:41:00.0, 49140, 300, 0, 31, 21.50, 4, 1, 16, 16, 580.126.09
1, GPU-bb, NVIDIA GB10, 00000000:42:00.0, [N/A], [N/A], 98, [Not Supported], [N/A], 4, 4, 16, 8, 580.126.09
"""
HOLDERS = "GPU-bb, 4294967, /usr/bin/python3, 1024\n"


def test_it_is_python_3_9_and_needs_nothing_of_ours() -> None:
    tree = ast.parse(Path(program.__file__).read_text(), feature_version=(3, 9))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= sys.stdlib_module_names


def test_cells_that_a_board_does_not_have_are_unknown() -> None:
    first, second = program.gpus(GPUS, HOLDERS)
    assert (first["memory_mib"], first["power_w"], first["pcie_generation"]) == (49140, 21.5, 1)
    assert first["holders"] == []
    assert (second["memory_mib"], second["temperature_c"], second["power_w"]) == (None, None, None)
    assert second["holders"] == [{"pid": 4294967, "name": "/usr/bin/python3", "memory_mib": 1024, "job": None}]
    assert program.gpus("No devices were found\n", "") == []


def test_no_driver_is_a_reason_and_not_an_empty_version() -> None:
    assert program.driver(GPUS) == "580.126.09"
    with pytest.raises(program.UnknownError, match="no NVIDIA driver is loaded"):
        program.driver("")


def test_an_engine_that_does_not_answer_is_none() -> None:
    dead = '{"ServerErrors": ["Cannot connect to the Docker daemon"], "ServerVersion": ""}'
    with pytest.raises(program.UnknownError, match="Cannot connect to the Docker daemon"):
        program.engine(dead)
    alive = program.engine('{"ServerVersion": "24.0.5", "Runtimes": {"nvidia": {}}, "DockerRootDir": "/"}')
    assert (alive["version"], alive["nvidia"]) == ("24.0.5", True)


def test_a_folder_that_is_not_there_yet_is_judged_by_where_it_will_lie(tmp_path: Path) -> None:
    found = program.disk(str(tmp_path / "a/b/c"))
    assert found["path"].endswith("a/b/c")
    assert found["writable"]
    assert 0 < found["free_bytes"] <= found["total_bytes"]


def test_one_part_that_fails_does_not_take_the_others_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia-smi", "docker"):
        (tmp_path / name).write_text("#!/bin/sh\necho broken >&2\nexit 9\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = program.collect("/", 5.0)
    assert (found["gpus"], found["engine"]) == (None, None)
    assert found["reasons"]["gpus"] == "nvidia-smi failed with 9: broken"
    assert found["reasons"]["engine"] == "docker failed with 9: broken"
    assert "holders" not in found["reasons"]
    assert found["memory"]["total_bytes"] > 0
