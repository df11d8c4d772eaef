"""Random targets of every supported architecture, a few thousand parameters each.

Their weights are larger than a fresh model's: with norms near zero and matrices near 0.02 a wrong norm, a
missing gate or a wrong position would hardly show in the logits.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}
# Two value heads to a key head, as in the 27B model, so that the grouping of heads is under test.
LINEAR: dict[str, Any] = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def hybrid(seed: int = 0, **changes: Any) -> nn.Module:
    """A Gated-DeltaNet hybrid, three linear layers to one of full attention."""
    config = transformers.Qwen3_5TextConfig(**SHAPE | LINEAR | {"vocab_size": 97, "eos_token_id": 5} | changes)
    return randomise(transformers.Qwen3_5ForCausalLM(config), seed)


def dense(seed: int = 0, **changes: Any) -> nn.Module:
    """A plain Qwen3 with full attention in every layer."""
    config = transformers.Qwen3Config(**SHAPE | {"vocab_size": 97, "eos_token_id": 5} | changes)
    return randomise(transformers.Qwen3ForCausalLM(config), seed)


def wrapped(seed: int = 0, **changes: Any) -> nn.Module:
    """The multimodal wrapper around the hybrid, with a vision tower that text never enters."""
    text = SHAPE | LINEAR | {"vocab_size": 97, "eos_token_id": 5} | changes
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": SHAPE["hidden_size"],
        "num_position_embeddings": 16,
    }
    special = dict.fromkeys(("image_token_id", "video_token_id", "vision_start_token_id"), 90)
    config = transformers.Qwen3_5Config(
        text_config=text, vision_config=vision, tie_word_embeddings=False, vision_end_token_id=91, **special
    )
    return randomise(transformers.Qwen3_5ForConditionalGeneration(config), seed)


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> nn.Module:
    """Fill every parameter from `seed`, in name order."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        drawn = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            parameter.copy_(drawn.abs().clamp(0.1, 4.0).log())
        elif parameter.ndim >= 2:
            parameter.copy_(0.2 * drawn)
        else:
            parameter.copy_(0.4 + 0.2 * drawn)
    return model.eval()
