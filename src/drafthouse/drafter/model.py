"""The DFlash drafter: Qwen3-style layers whose queries are masked blocks and whose context is the target's
own states.

Module names are the names of the published checkpoints: fc, hidden_norm, norm and, for each layer,
self_attn.{q,k,v,o}_proj, self_attn.{q,k}_norm, input_layernorm, post_attention_layernorm,
mlp.{gate,up,down}_proj; 11 tensors a layer and 3 more. There is no embedding and no lm_head: both are the
target's.

Source: arXiv 2602.06036 and its reference implementation (z-lab/dflash).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafthouse.drafter.attention import Bias, Documents, Implementation, attend
from drafthouse.drafter.config import SLIDING, DrafterConfig

KeyValue = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in fp32 under autocast too."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)
        return normed.to(x.dtype)


class Attention(nn.Module):
    """Projections and per-head norms of one layer; masking and softmax are in `attention.py`."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim)

    def key_value(self, x: Tensor, rotation: KeyValue) -> KeyValue:
        """Keys (normed, rotated) and values of `x` [..., hidden], each [..., kv_heads, d]."""
        return rotate(self.k_norm(self._heads(self.k_proj(x))), rotation), self._heads(self.v_proj(x))

    def forward(self, x: Tensor, rotation: KeyValue, context: KeyValue, bias: Bias) -> Tensor:
        """`x` [rows, anchors, block, hidden] → the same shape."""
        q = rotate(self.q_norm(self._heads(self.q_proj(x))), rotation)
        out: Tensor = self.o_proj(attend(q, context, self.key_value(x, rotation), bias))
        return out


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm decoder layer over block tokens."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotation: KeyValue, context: KeyValue, bias: Bias) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, context, bias)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DFlashDrafter(nn.Module):
    """Block-diffusion drafter: one forward fills all mask slots of every block.

    Args:
        config: the shape.
        attention: `split` (no wasted keys), `flex` (block-sparse, CUDA) or `dense` (the reference); all exact.
        seed: of the first weights.
    """

    def __init__(self, config: DrafterConfig, *, attention: Implementation = "split", seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.attention: Implementation = attention
        hidden = config.hidden_size
        # Modules draw weights of their own when they are made: at 1.7 billion that is half a minute for nothing.
        with torch.device("meta"):
            self.fc = nn.Linear(config.num_taps * hidden, hidden, bias=False)
            self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
            self.norm = RMSNorm(hidden, config.rms_norm_eps)
            self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.to_empty(device=torch.get_default_device())
        self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Matrices ~ N(0, 0.02²) from `seed`, norm weights 1; the same on every machine and independent of
        global RNG."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.is_meta:
                continue
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                drawn = torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator)
                parameter.copy_(drawn)

    def rotation(self, positions: Tensor) -> KeyValue:
        """cos and sin, each fp32 [..., 1, d/2], for absolute `positions` [...]; negative ones turn like 0."""
        d = self.config.head_dim
        powers = torch.arange(0, d, 2, dtype=torch.float32, device=positions.device) / d
        angles = positions.clamp_min(0).float().unsqueeze(-1) / self.config.rope_theta**powers
        return angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)

    def context(self, taps: Tensor) -> Tensor:
        """Fuse the tapped layer outputs of each target token.

        Args:
            taps: [rows, context, K * hidden] or [rows, context, K, hidden], in the order of
                `target_layer_ids`.

        Returns:
            c [rows, context, hidden]: read by every layer, updated by none.
        """
        if taps.dim() == 4:
            taps = taps.flatten(2)
        out: Tensor = self.hidden_norm(self.fc(taps.to(self.fc.weight.dtype)))
        return out

    def context_kv(self, c: Tensor, positions: Tensor) -> list[KeyValue]:
        """Keys and values of context tokens for every layer; what a decoder keeps as its cache.

        `c` does not pass `input_layernorm`: it is normed once, by `hidden_norm`.

        Args:
            c: [rows, context, hidden] from `context`.
            positions: int [rows, context], absolute; any value for padding.

        Returns:
            One (k, v) a layer, each [rows, kv_heads, context, d], k normed and rotated.
        """
        rotation = self.rotation(positions)
        pairs = [layer.self_attn.key_value(c, rotation) for layer in self._layers()]
        return [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in pairs]

    def blocks(
        self,
        embeddings: Tensor,
        anchors: Tensor,
        kv: list[KeyValue],
        context_positions: Tensor,
        documents: Documents | None = None,
    ) -> Tensor:
        """Denoise blocks in one pass.

        Args:
            embeddings: [rows, anchors, block, hidden] from the TARGET's embedding: slot 0 the anchor token,
                the others the mask token.
            anchors: int [rows, anchors], absolute position of slot 0; -1 marks an invalid block.
            kv: from `context_kv`, for context tokens at any positions; keys at positions >= an anchor are not
                seen by it.
            context_positions: int [rows, context], absolute; -1 marks padding.
            documents: see `attention.block_mask`, for rows that hold several documents.

        Returns:
            [rows, anchors, block, hidden] after the final norm, ready for the target's lm_head: slot k (k >=
            1) predicts the token at anchor + k. Invalid blocks are zero and carry no gradient.
        """
        block = embeddings.shape[2]
        x = embeddings.to(self.fc.weight.dtype)
        biases = self._biases(anchors, context_positions, block, x.dtype, documents)
        rotation = self.rotation(anchors.unsqueeze(-1) + torch.arange(block, device=anchors.device))
        for layer, kind, context in zip(self._layers(), self.config.layer_types, kv, strict=True):
            x = layer(x, rotation, context, biases[kind])
        out: Tensor = self.norm(x)
        return out.masked_fill((anchors < 0)[:, :, None, None], 0.0)

    def forward(
        self,
        taps: Tensor,
        embeddings: Tensor,
        anchors: Tensor,
        context_positions: Tensor,
        documents: Documents | None = None,
    ) -> Tensor:
        """Training pass over all anchors of each row; arguments and result as in `context` and `blocks`."""
        kv = self.context_kv(self.context(taps), context_positions)
        return self.blocks(embeddings, anchors, kv, context_positions, documents)

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def _biases(
        self,
        anchors: Tensor,
        context_positions: Tensor,
        block: int,
        dtype: torch.dtype,
        documents: Documents | None,
    ) -> dict[str, Bias]:
        biases: dict[str, Bias] = {}
        for kind in set(self.config.layer_types):
            window = self.config.sliding_window if kind == SLIDING else None
            biases[kind] = Bias.of(anchors, context_positions, block, window, self.attention, dtype, documents)
        return biases


def rotate(x: Tensor, rotation: KeyValue) -> Tensor:
    """Rotary embedding over the full head (halves paired as in Llama and Qwen), `x` [..., heads, d]."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)
