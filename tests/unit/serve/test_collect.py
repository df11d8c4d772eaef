from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drafthouse.serve.collect import (
    collect_facts,
    engine_facts,
    folder_facts,
    gpus_of_smi,
    host_facts,
    libavutil_majors,
    nvlink_of_topology,
    p2p_of_matrix,
    rewritten_keys,
)
from drafthouse.serve.errors import FactsError
from drafthouse.serve.facts import Facts, is_hybrid, layer_types, read_facts, write_facts
from drafthouse.serve.launch import model_path
from drafthouse.serve.preflight import preflight
from tests.unit.serve import clean
from tests.unit.serve.clean import CPU, DFLASH, MTP

TOPOLOGY = """\
\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity
GPU0\t X \t{link}\tPHB\t0-31\t0
GPU1\t{link}\t X \tSYS\t0-31\t0
NIC0\tPHB\tSYS\t X

Legend:
  X    = Self
"""
PEERS = """\
 \tGPU0\tGPU1
 GPU0\tX\t{state}
 GPU1\tOK\tX
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small checkpoint of two files with an index, as hubs hold them."""
    (tmp_path / "config.json").write_text(json.dumps(clean.CONFIG), encoding="utf-8")
    parts = {
        "model-00001-of-00002.safetensors": {"model.embed.weight": torch.zeros(4, 8, dtype=torch.bfloat16)},
        "model-00002-of-00002.safetensors": {"mtp.fc.weight": torch.zeros(8, 16, dtype=torch.bfloat16)},
    }
    for file, tensors in parts.items():
        save_file(tensors, tmp_path / file, metadata={"format": "pt"})
    index = {name: file for file, tensors in parts.items() for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    return tmp_path


class TestFolder:
    def test_names_shapes_and_bytes_without_reading_weights(self, folder: Path) -> None:
        facts = folder_facts(folder)
        assert facts.tensor_names == ("model.embed.weight", "mtp.fc.weight")
        assert facts.tensors is not None
        assert (facts.tensors["mtp.fc.weight"].shape, facts.tensors["mtp.fc.weight"].dtype) == ((8, 16), "BF16")
        assert facts.weight_bytes == (4 * 8 + 8 * 16) * 2
        assert (facts.problem, facts.missing_files) == (None, ())

    def test_a_download_that_stopped(self, folder: Path) -> None:
        (folder / "model-00002-of-00002.safetensors").unlink()
        facts = folder_facts(folder)
        assert facts.missing_files == ("model-00002-of-00002.safetensors",)
        assert facts.tensor_names == ("model.embed.weight", "mtp.fc.weight"), "the index names them all the same"
        assert facts.weight_bytes is None

    @pytest.mark.parametrize("keep", [0, 4, 20, -1])
    def test_a_file_that_is_cut_short(self, folder: Path, keep: int) -> None:
        path = folder / "model-00002-of-00002.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        facts = folder_facts(folder)
        assert facts.problem is not None
        assert "cut short" in facts.problem
        assert facts.config is not None

    @pytest.mark.parametrize(
        ("content", "problem"),
        [(None, "there is no config.json"), ("{", "cannot be read"), ("[]", "not a JSON object")],
    )
    def test_configs(self, folder: Path, content: str | None, problem: str) -> None:
        (folder / "config.json").unlink()
        if content is not None:
            (folder / "config.json").write_text(content, encoding="utf-8")
        facts = folder_facts(folder)
        assert facts.problem is not None
        assert problem in facts.problem

    def test_no_folder(self, tmp_path: Path) -> None:
        assert folder_facts(tmp_path / "gone").problem == "there is no folder gone"

    def test_an_index_without_a_map(self, folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text("{}", encoding="utf-8")
        assert folder_facts(folder).problem is not None

    def test_the_embedded_model(self) -> None:
        facts = folder_facts(Path(model_path("embedded")))
        assert facts.config is not None
        assert is_hybrid(facts.config)
        assert facts.weight_bytes == sum(tensor.bytes for tensor in (facts.tensors or {}).values()) > 0


class TestRoundTrip:
    """What transformers' own config class makes of a drafter's config."""

    sliding: dict[str, Any] = clean.drafter_config(
        layer_types=["sliding_attention"] * 4 + ["full_attention"],
        sliding_window=2048,
        use_sliding_window=True,
        max_window_layers=5,
    )

    def test_our_export_survives(self) -> None:
        assert rewritten_keys(clean.drafter_config()) == ()
        assert rewritten_keys(self.sliding) == ()

    def test_the_window_is_nulled_where_it_is_not_switched_on(self) -> None:
        bare = {key: value for key, value in self.sliding.items() if key != "use_sliding_window"}
        assert rewritten_keys(bare) == ("sliding_window: 2048 → None",)

    def test_a_type_that_nobody_knows(self) -> None:
        (sentence,) = rewritten_keys({"model_type": "no-such-model", "layer_types": []})
        assert sentence.startswith("config class raises ")


class TestNode:
    def test_gpus(self) -> None:
        gpus, driver = gpus_of_smi(
            "NVIDIA RTX A6000, 49140, 48601, 8.6, 580.126.09\nNVIDIA GB10, [N/A], [N/A], 12.1, 580.126.09\n"
        )
        assert driver == "580.126.09"
        assert gpus is not None
        assert (gpus[0].name, gpus[0].memory_mib, gpus[0].free_mib) == ("NVIDIA RTX A6000", 49_140, 48_601)
        assert gpus[0].compute_capability == (8, 6)
        assert (gpus[1].memory_mib, gpus[1].free_mib) == (None, None)

    @pytest.mark.parametrize("output", ["", "No devices were found\n"])
    def test_no_gpus(self, output: str) -> None:
        assert gpus_of_smi(output) == (None, None)

    @pytest.mark.parametrize(("link", "joined"), [("NV4", True), ("PHB", False), ("SYS", False), ("NODE", False)])
    def test_links(self, link: str, joined: bool) -> None:
        assert nvlink_of_topology(TOPOLOGY.format(link=link)) is joined

    @pytest.mark.parametrize(("state", "works"), [("OK", True), ("CNS", False), ("NS", False)])
    def test_peers(self, state: str, works: bool) -> None:
        assert p2p_of_matrix(PEERS.format(state=state)) is works

    def test_nothing_printed_is_not_known(self) -> None:
        assert nvlink_of_topology("") is None
        assert p2p_of_matrix("") is None
        assert libavutil_majors("") is None

    def test_libraries(self) -> None:
        line = "\tlibavutil.so.{0} (libc6,x86-64) => /lib/x86_64-linux-gnu/libavutil.so.{0}\n"
        assert libavutil_majors(line.format(58) + line.format(59) + "\tlibc.so.6 => /lib/libc.so.6\n") == (58, 59)
        assert libavutil_majors("1 libs found\n") == ()

    def test_this_machine(self) -> None:
        facts = host_facts()
        assert facts.shm_bytes is None or facts.shm_bytes > 0
        assert facts.memlock_bytes is None or facts.memlock_bytes >= -1

    def test_an_interpreter_without_the_engine_knows_nothing(self) -> None:
        facts = engine_facts(clean.profile(MTP, f"engine.python={sys.executable}"))
        assert (facts.version, facts.packages, facts.torchcodec) == (None, None, None)

    def test_no_interpreter(self) -> None:
        assert engine_facts(clean.profile(MTP, "engine.python=no-such-python")).version is None


class TestSnapshot:
    def test_written_and_read(self, tmp_path: Path) -> None:
        facts = clean.facts(clean.profile(DFLASH))
        write_facts(facts, tmp_path / "node.json")
        assert read_facts(tmp_path / "node.json") == facts

    @pytest.mark.parametrize(
        ("content", "said"),
        [(None, "no such file of facts"), ("{", "not readable as JSON"), ('{"hosts": {}}', "unknown key 'hosts'")],
    )
    def test_wrong_files(self, tmp_path: Path, content: str | None, said: str) -> None:
        path = tmp_path / "node.json"
        if content is not None:
            path.write_text(content, encoding="utf-8")
        with pytest.raises(FactsError, match=said):
            read_facts(path)

    def test_nowhere_to_write(self, tmp_path: Path) -> None:
        with pytest.raises(FactsError, match="cannot be written"):
            write_facts(Facts(), tmp_path / "gone" / "node.json")


class TestCollect:
    def test_folders_of_a_profile(self, folder: Path) -> None:
        facts = collect_facts(clean.profile(DFLASH), model=folder, draft=folder)
        assert facts.model is not None
        assert facts.draft is not None
        assert facts.model.rewritten is None
        assert facts.draft.rewritten is not None

    def test_a_hub_id_is_not_looked_for(self) -> None:
        facts = collect_facts(clean.profile(MTP))
        assert (facts.model, facts.draft) == (None, None)

    def test_a_drafter_that_was_not_trained_yet(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        profile = clean.profile(CPU)
        found = {finding.id: finding for finding in preflight(profile, collect_facts(profile))}
        assert found["drafter-unreadable"].severity == "error"


class TestReading:
    @pytest.mark.parametrize(
        ("config", "kinds"),
        [
            ({"layer_types": ["full_attention"]}, ("full_attention",)),
            (
                {"text_config": {"num_hidden_layers": 4, "full_attention_interval": 2}},
                ("linear_attention", "full_attention") * 2,
            ),
            ({"num_hidden_layers": 4}, None),
        ],
    )
    def test_layer_types(self, config: dict[str, Any], kinds: tuple[str, ...] | None) -> None:
        assert layer_types(config) == kinds
