# ruff: noqa: N802  (names are those of the library)
"""Readings of GPUs, and machines that have none."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from drafthouse import gpu
from drafthouse.drafter.gauge import Gauge
from drafthouse.gpu import read_gpu, read_gpus, uuid_of

MIB = 2**20


class NVMLError(Exception):
    """As the library's own."""


class Library(ModuleType):
    """A double of nvidia-ml-py over two GPUs; what is named in `refused` is not supported."""

    NVML_TEMPERATURE_GPU = 0
    NVMLError = NVMLError

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.refused: set[str] = set()
        self.opened = 0

    def _answer(self, name: str, value: Any) -> Any:
        if name in self.refused:
            raise NVMLError("Not Supported")
        return value

    def nvmlInit(self) -> None:
        self._answer("nvmlInit", None)
        self.opened += 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in {"GPU-0", "GPU-1"}:
            raise NVMLError("Not Found")
        return int(uuid[-1])

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return self._answer("memory", SimpleNamespace(total=1000 * MIB, used=250 * MIB))

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return self._answer("load", SimpleNamespace(gpu=97, memory=10))

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 61

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return int(self._answer("power", 650_500))

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return int(self._answer("power", 700_000))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.setattr(gpu, "_library", None)
    return made


def test_all_gpus_with_their_units(library: Library) -> None:
    first, second = read_gpus()
    assert (first.index, first.uuid, second.uuid, first.name) == (0, "GPU-0", "GPU-1", "NVIDIA H200")
    assert (first.memory_mib, first.used_mib) == (1000, 250)
    assert (first.utilization_percent, first.temperature_c) == (97, 61)
    assert (first.power_w, first.power_limit_w) == (650.5, 700)
    assert library.opened == 1
    read_gpus()
    assert library.opened == 1, "the library is opened once for the process"


def test_what_a_gpu_does_not_tell_is_none(library: Library) -> None:
    library.refused = {"load", "power"}
    found = read_gpu("GPU-1")
    assert found is not None
    assert (found.utilization_percent, found.power_w, found.power_limit_w) == (None, None, None)
    assert (found.used_mib, found.temperature_c) == (250, 61)
    assert read_gpu("GPU-9") is None


def test_a_driver_that_comes_later_is_found(library: Library) -> None:
    library.refused = {"nvmlInit"}
    assert read_gpus() == []
    library.refused = set()
    assert len(read_gpus()) == 2


def test_a_training_leaves_out_what_its_gpu_does_not_tell(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 4 * 2**30)
    assert uuid_of(device) == "GPU-1"
    gauge = Gauge(device)
    everything = gauge.read()
    assert everything == {
        "gpu_memory_gib": 3.0,
        "gpu_memory_peak_gib": 4.0,
        "gpu_utilization_percent": 97.0,
        "gpu_temperature_c": 61.0,
        "gpu_power_w": 650.5,
    }
    library.refused = {"power"}
    assert gauge.read().keys() == everything.keys() - {"gpu_power_w"}


def test_a_cpu_has_nothing_to_read() -> None:
    assert uuid_of(torch.device("cpu")) is None
    assert Gauge(torch.device("cpu")).read() == {}


def test_without_the_package_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(gpu, "_library", None)
    monkeypatch.setattr(importlib, "import_module", missing)
    assert read_gpus() == []
    assert read_gpu("GPU-0") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_real_library_without_a_driver_is_no_error() -> None:
    pytest.importorskip("pynvml")
    assert read_gpus() == []
