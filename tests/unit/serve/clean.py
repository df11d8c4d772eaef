"""Profiles as shipped, and facts of a node on which nothing is wrong with them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from drafthouse.drafter.config import DrafterConfig
from drafthouse.serve.facts import EngineFacts, Facts, FolderFacts, Gpu, HostFacts
from drafthouse.serve.load import load_profile, profile_names
from drafthouse.serve.profile import Profile
from drafthouse.serve.versions import PINS, distribution

PROFILES = Path(__file__).parents[3] / "inventory" / "profiles"
NAMES = profile_names(PROFILES)
MTP, DFLASH = "qwen3.6-27b-mtp-a6000x2", "qwen3.6-27b-dflash-a6000x2"
VLLM_MTP, VLLM_DFLASH = "qwen3.6-27b-vllm-mtp-a6000x2", "qwen3.6-27b-vllm-dflash-a6000x2"
CPU = "embedded-dflash-cpu"

# Qwen3.6-27B's published config, as far as anything here reads it.
TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 248_320,
    "max_position_embeddings": 262_144,
    "full_attention_interval": 4,
    "attn_output_gate": True,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "eos_token_id": 248_044,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "text_config": TEXT,
    "vision_config": {"model_type": "qwen3_5", "depth": 27, "hidden_size": 1152},
}
WEIGHT_BYTES = 2 * 27_780_000_000
DRAFT_BYTES = 2 * 1_730_000_000


def drafter_config(**changes: Any) -> dict[str, Any]:
    """config.json of a drafter for the 27B target, as the export writes it."""
    config = DrafterConfig(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        block_size=16,
        target_layer_ids=(1, 16, 31, 46, 61),
        num_target_layers=64,
        vocab_size=248_320,
        mask_token_id=248_070,
    )
    return {**config.to_hf_dict(), **changes}


def profile(name: str, *overrides: str) -> Profile:
    """A shipped profile with overrides."""
    return load_profile(name, overrides, PROFILES)


def facts(of: Profile) -> Facts:
    """Everything known, and nothing wrong."""
    embedded = of.model.path == "embedded"
    config = copy.deepcopy(CONFIG)
    draft = drafter_config()
    if embedded:
        config["text_config"] |= {"num_hidden_layers": 4, "hidden_size": 128, "vocab_size": 1024}
        draft |= {"hidden_size": 128, "vocab_size": 1024, "num_target_layers": 4, "block_size": 8}
        draft["dflash_config"] = {"block_size": 8, "mask_token_id": 3, "target_layer_ids": [0, 1, 2]}
    name = distribution(of.engine.name, of.engine.device)
    packages = {name: of.engine.version, **PINS.get((name, of.engine.version), {})}
    gpu = Gpu(name="NVIDIA RTX A6000", memory_mib=49_140, free_mib=48_600, compute_capability=(8, 6))
    return Facts(
        model=FolderFacts(config=config, tensor_names=("lm_head.weight", "mtp.fc.weight"), weight_bytes=WEIGHT_BYTES),
        draft=FolderFacts(config=draft, tensor_names=("fc.weight",), weight_bytes=DRAFT_BYTES, rewritten=()),
        host=HostFacts(
            gpus=(gpu, gpu),
            driver="580.126.09",
            p2p=True,
            nvlink=False,
            shm_bytes=64 * 1024**3,
            memlock_bytes=-1,
            glibc="2.39",
            libavutil=(58,),
            nvcc="13.0",
        ),
        engine=EngineFacts(version=of.engine.version, packages=packages, torchcodec="ok", uv="0.12.3"),
    )
