"""The drafter once more, written plainly: one query, one key at a time, with transformers' own norm and
rotation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from drafthouse.drafter.config import SLIDING, DrafterConfig


def visible(query: int, key: int, *, key_is_context: bool, anchor: int, sliding: bool, window: int | None) -> bool:
    """The mask rule for absolute positions; own-block keys are given with key_is_context False."""
    if sliding:
        assert window is not None
        if key > query or key <= query - window:
            return False
    return not key_is_context or 0 <= key < anchor


def forward(
    config: DrafterConfig,
    weights: dict[str, Tensor],
    taps: Tensor,
    embeddings: Tensor,
    anchor: int,
    positions: list[int],
) -> Tensor:
    """One block of one row: taps [context, K * hidden], embeddings [block, hidden] → hidden [block,
    hidden]."""

    def norm(name: str, x: Tensor) -> Tensor:
        module = Qwen3RMSNorm(x.shape[-1], config.rms_norm_eps)
        module.weight.data = weights[name].to(x.dtype)
        return module.to(x.dtype)(x)

    def turned(x: Tensor, at: list[int]) -> Tensor:  # [n, heads, d]
        d = config.head_dim
        inverse = 1.0 / config.rope_theta ** (torch.arange(0, d, 2).float() / d)
        angles = torch.tensor(at).float()[:, None] * inverse
        both = torch.cat([angles, angles], -1)[None]
        q, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], both.cos(), both.sin())
        return q[0].transpose(0, 1)

    heads, kv_heads, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    block = embeddings.shape[0]
    at = [anchor + i for i in range(block)]
    c = norm("hidden_norm.weight", taps @ weights["fc.weight"].T)
    x = embeddings
    for n, kind in enumerate(config.layer_types):
        layer = f"layers.{n}."
        attn = layer + "self_attn."
        y = norm(layer + "input_layernorm.weight", x)
        q = turned(norm(attn + "q_norm.weight", (y @ weights[attn + "q_proj.weight"].T).view(-1, heads, d)), at)
        source = torch.cat([c, y])
        where = [max(p, 0) for p in positions] + at
        k = norm(attn + "k_norm.weight", (source @ weights[attn + "k_proj.weight"].T).view(-1, kv_heads, d))
        k = turned(k, where)
        v = (source @ weights[attn + "v_proj.weight"].T).view(-1, kv_heads, d)
        out = torch.zeros(block, heads, d)
        for i in range(block):
            seen = []
            for j, position in enumerate([*positions, *at]):
                is_context = j < len(positions)
                if visible(
                    at[i],
                    position,
                    key_is_context=is_context,
                    anchor=anchor,
                    sliding=kind == SLIDING,
                    window=config.sliding_window,
                ):
                    seen.append(j)
            for head in range(heads):
                group = head // (heads // kv_heads)
                scores = torch.stack([q[i, head] @ k[j, group] for j in seen]) / d**0.5
                out[i, head] = scores.softmax(0) @ v[seen, group]
        x = x + out.flatten(1) @ weights[attn + "o_proj.weight"].T
        y = norm(layer + "post_attention_layernorm.weight", x)
        up = silu(y @ weights[layer + "mlp.gate_proj.weight"].T) * (y @ weights[layer + "mlp.up_proj.weight"].T)
        x = x + up @ weights[layer + "mlp.down_proj.weight"].T
    return norm("norm.weight", x)
