"""A text-only target as a folder that SGLang serves.

SGLang 0.5.17 drafts by DFLASH for the class that wraps a vision tower, as the released 27B is; its text-only class
lacks the hook that hands out layer outputs. So the text weights go unchanged into the wrapper's layout, beside a vision
tower of one layer that no text ever enters.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5VisionModel

Layout = Literal["wrapper", "text"]
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
# The smallest tower that the vision code of both libraries takes: two heads of 32, rotary pairs in two axes.
VISION = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "deepstack_visual_indexes": [],
}
IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 4096, "longest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
VIDEOS = IMAGES | {"video_processor_type": "Qwen3VLVideoProcessor"}
_VISION_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def served_text_config(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with what SGLang's own config classes read and transformers leaves out.

    `full_attention_interval` says where the full layers lie, and `partial_rotary_factor` stands beside the rotary
    parameters, not only among them.

    Raises:
        ValueError: the full layers do not lie at one interval, which SGLang cannot be told.
    """
    layers: Sequence[str] = config["layer_types"]
    interval = list(layers).index("full_attention") + 1
    expected = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(len(layers))]
    if list(layers) != expected:
        raise ValueError(f"full attention does not lie at every {interval}th of the layers {list(layers)}")
    rotary = dict(config["rope_parameters"])
    factor = rotary.setdefault("partial_rotary_factor", config.get("partial_rotary_factor", 0.25))
    pairs = int(config["head_dim"] * factor) // 2
    # Time, height and width share the rotary pairs as in the released models (11, 11, 10 of 32); text has all equal.
    height = width = pairs // 3
    rotary |= {"mrope_section": [pairs - height - width, height, width], "mrope_interleaved": True}
    return config | {
        "full_attention_interval": interval,
        "partial_rotary_factor": factor,
        "rope_theta": rotary["rope_theta"],
        "rope_parameters": rotary,
    }


def serveable(target: Path, out: Path, layout: Layout) -> Path:
    """Write the text-only model folder `target` as `out` in one of two layouts; its weights stay bit for bit."""
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    if config["architectures"] != ["Qwen3_5ForCausalLM"]:
        raise ValueError(f"{target.name} is {config['architectures']}, not a text-only Qwen3_5ForCausalLM")
    out.mkdir(parents=True)
    for name in TOKENIZER:
        if (target / name).exists():
            shutil.copy(target / name, out)
    text = served_text_config(config)
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(target.glob("*.safetensors")):
        weights |= load_file(path)
    if layout == "wrapper":
        text, weights = wrapped(text, weights)
        for name, content in (("preprocessor_config.json", IMAGES), ("video_preprocessor_config.json", VIDEOS)):
            (out / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    return out


def wrapped(text: dict[str, Any], weights: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and weights of the wrapper around a text-only model."""
    dtype = next(iter(weights.values())).dtype
    vocabulary = text["vocab_size"]
    whole: dict[str, Any] = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "vision_config": VISION | {"model_type": "qwen3_5", "out_hidden_size": text["hidden_size"]},
        # Outside the vocabulary: no text can hold an image.
        **{name: vocabulary + number for number, name in enumerate(_VISION_TOKENS)},
        "tie_word_embeddings": False,
        "dtype": text.get("dtype", "bfloat16"),
        "eos_token_id": text.get("eos_token_id"),
        "pad_token_id": text.get("pad_token_id"),
    }
    torch.manual_seed(0)
    tower = Qwen3_5VisionModel._from_config(Qwen3_5Config(**whole).vision_config)
    renamed = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in weights.items()
    }
    renamed |= {f"model.visual.{name}": tensor.to(dtype) for name, tensor in tower.state_dict().items()}
    return whole, renamed
