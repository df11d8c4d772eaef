"""Drafter configs: rules, refusals, and the config.json layout."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from drafthouse.drafter.config import FULL, SLIDING, DrafterConfig, DrafterShape, default_target_layer_ids
from drafthouse.errors import DrafterError
from tests.unit.drafter.doubles import tiny_config

PUBLISHED: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "block_size": 16,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    "num_hidden_layers": 5,
    "num_target_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "rope_theta": 10000000,
    "rope_scaling": None,
    "layer_types": [SLIDING] * 4 + [FULL],
    "sliding_window": 2048,
    "use_sliding_window": True,
    "vocab_size": 248320,
    "eos_token_id": 248044,
    "pad_token_id": 248044,
}


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (40, 5, (1, 10, 19, 28, 37)),
        (64, 5, (1, 16, 31, 46, 61)),
        (10, 1, (5,)),
    ],
)
def test_default_taps_are_those_of_the_published_drafters(layers: int, count: int, ids: tuple[int, ...]) -> None:
    assert default_target_layer_ids(layers, count) == ids
    config = tiny_config(num_target_layers=layers, num_hidden_layers=count, target_layer_ids=())
    assert config.target_layer_ids == ids


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_layer_ids": (2, 1)}, "strictly increasing"),
        ({"target_layer_ids": (1, 1)}, "unique"),
        ({"target_layer_ids": (1, 4)}, r"out of range: the target has layers 0 to 3"),
        ({"target_layer_ids": (-1, 2)}, "out of range"),
        ({"target_layer_ids": ()}, "too shallow for the default rule"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"head_dim": 7}, "even"),
        ({"layer_types": (FULL,)}, "names 1 layers but num_hidden_layers is 2"),
        ({"layer_types": (SLIDING, FULL)}, "sliding_window must be set"),
        ({"layer_types": ("chunked", FULL)}, "full_attention"),
        ({"mask_token_id": 20}, "outside the target's vocabulary of 20"),
        ({"block_size": 1}, "greater than or equal to 2"),
    ],
)
def test_impossible_configs_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        tiny_config(**changes)


def test_written_layout_says_everything_that_readers_guess() -> None:
    config = tiny_config(layer_types=(SLIDING, FULL), sliding_window=8, target_identity="ab" * 32, eos_token_id=3)
    written = config.to_hf_dict()
    assert written["architectures"] == ["DFlashDraftModel"]
    assert written["model_type"] == "qwen3"
    assert "auto_map" not in written
    assert written["block_size"] == written["dflash_config"]["block_size"] == 4
    assert written["dflash_config"]["target_layer_ids"] == [0, 2]
    assert written["num_target_layers"] == 4
    assert written["layer_types"] == [SLIDING, FULL]
    assert (written["use_sliding_window"], written["sliding_window"]) == (True, 8)
    assert written["max_window_layers"] == 2
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 1e7
    assert written["rope_scaling"] is None
    assert written["rope_parameters"]["rope_type"] == "default"
    # Mixed layers: both engines' default causality is how we train, so the override must be absent.
    assert "is_causal" not in written
    assert "causal" not in written["dflash_config"]
    assert DrafterConfig.from_hf_dict(written) == config


@pytest.mark.parametrize(("kind", "causal"), [(FULL, False), (SLIDING, True)])
def test_uniform_layers_state_their_causality(kind: str, causal: bool) -> None:
    config = tiny_config(layer_types=(kind, kind), sliding_window=8 if causal else None)
    written = config.to_hf_dict()
    assert written["is_causal"] is causal
    assert written["use_sliding_window"] is causal
    assert DrafterConfig.from_hf_dict(written) == config


def test_published_config_is_read() -> None:
    config = DrafterConfig.from_hf_dict(PUBLISHED)
    assert config.block_size == 16
    assert config.target_layer_ids == (1, 16, 31, 46, 61)
    assert config.sliding_window == 2048
    assert config.target_identity == ""


def test_nested_block_size_and_new_rope_key_are_read() -> None:
    newer = {k: v for k, v in PUBLISHED.items() if k not in ("block_size", "rope_theta", "rope_scaling")}
    newer["dflash_config"] = PUBLISHED["dflash_config"] | {"block_size": 8}
    newer["rope_parameters"] = {"rope_theta": 5e6, "rope_type": "default"}
    config = DrafterConfig.from_hf_dict(newer)
    assert (config.block_size, config.rope_theta) == (8, 5e6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["DFlashSpeculator"]}, "architectures"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling"),
        ({"rope_parameters": {"rope_theta": 1e7, "rope_type": "yarn"}}, "rope_type"),
        ({"sliding_window": None}, "sliding_window is null"),
        ({"use_sliding_window": False}, "use_sliding_window is not true"),
        ({"attention_bias": True}, "no biases"),
        ({"is_causal": True}, "is_causal True contradicts layer_types"),
        ({"is_causal": False}, "is_causal False contradicts layer_types"),
        ({"hidden_size": None, "head_dim": None}, "lacks head_dim, hidden_size"),
        ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": [5, 64]}}, "out of range"),
    ],
)
def test_configs_that_we_would_compute_differently_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DrafterError, match=words) as caught:
        DrafterConfig.from_hf_dict(PUBLISHED | changes, where="some/config.json")
    assert str(caught.value).startswith("some/config.json: ")


def test_shape_becomes_a_config_for_its_target() -> None:
    shape = DrafterShape(target_layer_ids=(0, 1, 2), block_size=8)
    config = shape.for_target(hidden_size=128, vocab_size=1024, num_layers=4, mask_token_id=3, identity="x")
    assert (config.intermediate_size, config.num_target_layers, config.target_identity) == (384, 4, "x")
    with pytest.raises(DrafterError, match="out of range"):
        shape.for_target(hidden_size=128, vocab_size=1024, num_layers=2, mask_token_id=3)
