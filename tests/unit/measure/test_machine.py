from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from drafthouse.measure import machine

SMI = "NVIDIA H200, 143771, 580.82.07\nNVIDIA GB10, [N/A], 580.95\nOdd, name, 1024, 1.0\n"


def test_collected_dict_is_plain_and_names_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine.collect_machine()
    text = json.dumps(found, allow_nan=False)
    assert found["cpu_cores_usable"] >= 1
    assert found["memory_total_bytes"] > 1e8
    assert found["python"].endswith(platform.python_version())
    assert set(found["versions"]) >= {"torch", "transformers", "numpy"}
    node = platform.node()
    assert len(node) < 4 or node not in text
    assert str(Path.home()) == "/" or str(Path.home()) not in text


def test_keys_carry_their_units() -> None:
    numbers = {key for key, value in machine.collect_machine().items() if isinstance(value, int | float)}
    assert all(key.endswith(("_bytes", "_logical", "_usable", "_cores", "min")) for key in numbers), numbers


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("processor\t: 0\nmodel\t\t: 1\nmodel name\t: AMD EPYC 9354 \nprocessor\t: 1\n", "AMD EPYC 9354"),
        ("processor\t: 0\nBogoMIPS\t: 108.00\nModel\t\t: Raspberry Pi 5 Model B\n", "Raspberry Pi 5 Model B"),
        ("processor\t: 0\nCPU part\t: 0xd0c\n", None),
        ("", None),
    ],
)
def test_cpu_model(text: str, model: str | None) -> None:
    assert machine.cpu_model(text) == model


def test_memory_is_in_bytes() -> None:
    text = "MemTotal:       24684096 kB\nMemAvailable:   24098208 kB\nHugePages_Total:       0\n"
    assert machine.memory_bytes(text) == {"MemTotal": 24684096 * 1024, "MemAvailable": 24098208 * 1024}


@pytest.mark.parametrize(
    ("text", "cores"), [("150000 100000\n", 1.5), ("max 100000\n", None), ("", None), ("1 0", None)]
)
def test_cpu_quota(text: str, cores: float | None) -> None:
    assert machine.cpu_quota_cores(text) == cores


@pytest.mark.parametrize(("text", "limit"), [("4294967296\n", 4294967296), ("max\n", None), ("", None)])
def test_memory_limit(text: str, limit: int | None) -> None:
    assert machine.memory_limit_bytes(text) == limit


def test_gpus_of_smi_output() -> None:
    assert machine.gpus_of_smi(SMI) == [
        {"name": "NVIDIA H200", "memory_bytes": 143771 * 1024**2, "driver": "580.82.07"},
        {"name": "NVIDIA GB10", "memory_bytes": None, "driver": "580.95"},
        {"name": "Odd, name", "memory_bytes": 1024**3, "driver": "1.0"},
    ]


def test_gpus_come_from_the_tool_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{SMI}END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert [gpu["name"] for gpu in machine.collect_machine()["gpus"]] == [
        "NVIDIA H200",
        "NVIDIA GB10",
        "Odd, name",
    ]


def test_a_tool_that_fails_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed, really, 1'\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert "has failed" not in json.dumps(machine.collect_machine()["gpus"])


def test_absent_packages_are_left_out() -> None:
    assert machine.package_versions(("numpy", "no-such-package-at-all")).keys() == {"numpy"}
