"""The hardware table, and what a node's own facts make of it. nvidia-smi's texts are as it printed them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafthouse.measure.roofline import RooflineError, known_hardware, load_hardware, probe, speed
from drafthouse.measure.roofline.hardware import Figure, Hardware, pcie_gb_s
from drafthouse.measure.roofline.probe import NodeFacts, Speeds, hardware_of, parse_gpus, parse_topology

ONE_H200 = "0, NVIDIA H200, 143771, 00000000:00:06.0, 5, 5, 16, 16\n"
IDLE_A6000 = (
    "0, NVIDIA RTX A6000, 49140, 00000000:41:00.0, 4, 1, 16, 16\n"
    "1, NVIDIA RTX A6000, 49140, 00000000:C1:00.0, 4, 1, 16, 16\n"
)
TOPOLOGY_ONE = """\t\x1b[4mGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \t0-15\t0\t\tN/A

Legend:

  X    = Self
"""
TOPOLOGY_SYS = """\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tSYS\t0-31\t0\t\tN/A
GPU1\tSYS\t X \t32-63\t1\t\tN/A

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""
MEASURED = Speeds(700.0, {"bfloat16": 120.0, "float32": 30.0}, "measured here", host_link_gb_s=25.1)


class TestTable:
    @pytest.mark.parametrize("entry", known_hardware().values(), ids=lambda entry: entry.name)
    def test_every_figure_has_a_source_and_a_sane_size(self, entry: Hardware) -> None:
        figures = [entry.bandwidth_gb_s, *entry.tflops.values(), *(link.gb_s for link in entry.links.values())]
        assert all(len(figure.source) > 20 for figure in figures), "the full text, not its key"
        assert 100 < entry.bandwidth_gb_s.value < 10_000
        assert entry.tflops["float32"].value < entry.tflops["bfloat16"].value
        assert entry.link in entry.links
        assert entry.reported_as

    def test_an_entry_is_found_by_the_name_that_nvidia_smi_prints(self) -> None:
        assert load_hardware("NVIDIA RTX A6000") is not None
        assert load_hardware("NVIDIA RTX A6000") == load_hardware("a6000") == load_hardware("A6000")

    def test_unknown_hardware_lists_the_known(self) -> None:
        with pytest.raises(RooflineError, match=r"no hardware is called 'v100'; choose one of a6000, .*h200.*'probe'"):
            load_hardware("v100")

    def test_a_link_that_it_has_not(self) -> None:
        assert load_hardware("a6000").with_link("nvlink").link == "nvlink"
        with pytest.raises(RooflineError, match="L40S has no link 'nvlink'; use one of pcie"):
            load_hardware("l40s").with_link("nvlink")

    def test_pcie(self) -> None:
        assert pcie_gb_s(4, 16) == pytest.approx(31.5, rel=1e-3)
        assert pcie_gb_s(4, 8) == pcie_gb_s(3, 16)
        with pytest.raises(RooflineError, match="generation 9"):
            pcie_gb_s(9, 16)


class TestParse:
    def test_gpus(self) -> None:
        first = parse_gpus(IDLE_A6000)[0]
        assert (first.name, first.memory_mib, first.generation_max, first.generation_now) == (
            "NVIDIA RTX A6000",
            49140,
            4,
            1,
        )
        assert parse_gpus("0, NVIDIA GB10, [N/A], 0000000F:01:00.0, 5, 1, 4, [N/A]\n")[0].memory_mib is None
        assert parse_gpus("No devices were found\n") == ()

    def test_topology(self) -> None:
        assert parse_topology(TOPOLOGY_SYS) == {(0, 1): "SYS", (1, 0): "SYS"}
        assert parse_topology(TOPOLOGY_ONE) == {}
        assert parse_topology("") == {}

    def test_numa_node(self, tmp_path: Path) -> None:
        device = tmp_path / "0000:c1:00.0"
        device.mkdir()
        (device / "numa_node").write_text("1\n", encoding="ascii")
        assert probe._numa_node("00000000:C1:00.0", tmp_path) == 1
        (device / "numa_node").write_text("-1\n", encoding="ascii")
        assert probe._numa_node("00000000:C1:00.0", tmp_path) is None
        assert probe._numa_node("00000000:41:00.0", tmp_path) is None


class TestHardwareOf:
    def test_two_a6000_over_two_numa_nodes(self) -> None:
        idle = tuple(probe.GpuFacts(**vars(gpu) | {"numa_node": gpu.index}) for gpu in parse_gpus(IDLE_A6000))
        busy = parse_gpus(IDLE_A6000.replace(", 4, 1, 16, 16", ", 4, 4, 16, 16"))
        found = hardware_of(NodeFacts(idle, parse_topology(TOPOLOGY_SYS), busy), MEASURED)
        assert (found.name, found.link) == ("a6000", "pcie")
        assert found.links["pcie"].gb_s.value == pytest.approx(31.5, rel=1e-3)
        assert "4.0 x16 under load" in found.links["pcie"].gb_s.source
        assert found.bandwidth_gb_s == Figure(value=700.0, source="measured here")
        told = " ".join(found.notes)
        assert "generation 1 while idle, 4 under load" in told
        assert "interconnect between NUMA nodes between them (SYS, NUMA nodes 0 and 1)" in told
        assert "91% of the data sheet" in told

    def test_a_link_that_stays_slow_under_load_is_told(self) -> None:
        busy = parse_gpus(IDLE_A6000.replace(", 4, 1, 16, 16", ", 4, 3, 16, 8"))
        found = hardware_of(NodeFacts(parse_gpus(IDLE_A6000), parse_topology(TOPOLOGY_SYS), busy), MEASURED)
        assert found.links["pcie"].gb_s.value == pytest.approx(pcie_gb_s(3, 8))
        assert any("could be of generation 4" in note for note in found.notes)

    def test_nvlink_is_taken_where_it_is(self) -> None:
        topology = parse_topology(TOPOLOGY_SYS.replace("SYS\t", "NV4\t"))
        found = hardware_of(NodeFacts(parse_gpus(IDLE_A6000), topology), MEASURED)
        assert found.link == "nvlink"
        assert any("share 4 NVLinks" in note for note in found.notes)

    def test_one_h200_has_no_link_and_scales_fp8(self) -> None:
        speeds = Speeds(4258.0, {"bfloat16": 785.0, "float32": 51.0}, "measured here")
        found = hardware_of(NodeFacts(parse_gpus(ONE_H200), parse_topology(TOPOLOGY_ONE)), speeds)
        assert (found.name, found.link, found.links) == ("h200", None, {})
        assert found.tflops["fp8"].value == pytest.approx(2 * 785)
        assert found.memory_gb is not None
        assert found.memory_gb.value == pytest.approx(150.75, rel=1e-3)

    def test_a_gpu_that_is_not_in_the_table(self) -> None:
        facts = NodeFacts(parse_gpus(IDLE_A6000.replace("RTX A6000", "Titan Z")), parse_topology(TOPOLOGY_SYS))
        found = hardware_of(facts, MEASURED)
        assert (found.name, found.title) == ("probed", "NVIDIA Titan Z")
        assert set(found.tflops) == {"bfloat16", "float32"}

    def test_gpus_that_differ_are_told(self) -> None:
        other = "1, NVIDIA GeForce RTX 3090, 24576, 00000000:C1:00.0, 4, 1, 16, 16\n"
        facts = NodeFacts(parse_gpus(IDLE_A6000.splitlines()[0] + "\n" + other), {})
        assert any("The GPUs differ" in note for note in hardware_of(facts, MEASURED).notes)

    def test_no_gpu(self) -> None:
        with pytest.raises(RooflineError, match="no GPU was found"):
            hardware_of(NodeFacts(()), MEASURED)


class TestSpeed:
    CPU = torch.device("cpu")

    def test_rates_of_this_cpu_are_physical(self) -> None:
        assert 0.2 < speed.read_gb_s(self.CPU, 32 * speed.MIB) < 2000
        assert 0.2 < speed.copy_gb_s(self.CPU, 32 * speed.MIB) < 2000
        assert 1e-4 < speed.matmul_tflops(self.CPU, torch.float32, 128) < 100

    def test_a_machine_without_nvidia_smi_is_its_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        monkeypatch.setattr(speed, "_CPU_BUFFER", 32 * speed.MIB)
        found = probe.hardware_from_probe()
        assert found.name == "cpu"
        assert found.link is None
        assert found.tflops["bfloat16"].value >= found.tflops["float32"].value > 0
        assert "threads" in found.bandwidth_gb_s.source

    @pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use a GPU here")
    def test_gpus_that_torch_cannot_use(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        smi = tmp_path / "nvidia-smi"
        smi.write_text(f"#!/bin/sh\nprintf '%s' '{IDLE_A6000}'\n", encoding="utf-8")
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        with pytest.raises(RooflineError, match="nvidia-smi lists 2 GPUs but torch can use none"):
            probe.hardware_from_probe()
