from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from sglang_gate.folders import Layout, serveable, served_text_config

from drafthouse.loop.tiny import embedded_target
from drafthouse.target import Target


@pytest.mark.parametrize("layout", ["wrapper", "text"])
def test_a_served_folder_is_the_same_model(layout: Layout, tmp_path: Path) -> None:
    folder = serveable(embedded_target(), tmp_path / "served", layout)
    own, served = Target.load(embedded_target()), Target.load(folder)
    architectures = {"wrapper": "Qwen3_5ForConditionalGeneration", "text": "Qwen3_5ForCausalLM"}
    assert type(served.model).__name__ == architectures[layout]
    ids, lengths = torch.arange(3, 83).view(2, 40), torch.tensor([40, 40])
    layers = list(range(own.num_layers))
    assert torch.equal(own.capture(ids, lengths, layers), served.capture(ids, lengths, layers))
    assert served.eos_ids == own.eos_ids
    assert served.tokenizer.chat_template == own.tokenizer.chat_template


def test_the_config_says_what_the_engine_reads() -> None:
    config = json.loads((embedded_target() / "config.json").read_text(encoding="utf-8"))
    text = served_text_config(config)
    assert (text["full_attention_interval"], text["partial_rotary_factor"]) == (4, 0.25)
    assert sum(text["rope_parameters"]["mrope_section"]) == config["head_dim"] * 0.25 / 2


def test_an_irregular_pattern_of_layers_is_refused() -> None:
    config = json.loads((embedded_target() / "config.json").read_text(encoding="utf-8"))
    config["layer_types"] = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    with pytest.raises(ValueError, match="every 2th"):
        served_text_config(config)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}', encoding="utf-8")
    with pytest.raises(ValueError, match="LlamaForCausalLM"):
        serveable(tmp_path, tmp_path / "out", "wrapper")
