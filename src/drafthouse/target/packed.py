"""Many short texts in one row: a Qwen3.5-class hybrid run on packed rows, to train small ones without padding.

A text sees nothing of its neighbours: attention is masked to the text, positions begin anew, the convolution's window
does not reach over the border, and the recurrent state begins at zero. What a text gives is therefore what it gives in
a row of its own (in tests, to float32 rounding), which transformers' own forward cannot do without flash-linear-
attention.

Everything is a function of tensors, so that `torch.compile` makes one kernel set for all layers of a kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafthouse.target.chunked import RESET, chunked_delta_rule

# What a token's successor counts for: nothing (end of its text), a little, or fully.
NO_LABEL, OTHER, ANSWER = 0, 1, 2


@dataclass(frozen=True)
class PackedRows:
    """Texts one behind another.

    Attributes:
        ids: int64 `[rows, width]`.
        positions: int64 `[rows, width]`, counted from 0 in every text; padding is a text of its own.
        labels: int64 `[rows, width]`, the following token.
        roles: uint8 `[rows, width]`, `NO_LABEL`, `OTHER` or `ANSWER`: what that token is.
    """

    ids: Tensor
    positions: Tensor
    labels: Tensor
    roles: Tensor

    def to(self, device: torch.device | str) -> PackedRows:
        """On `device`; from pinned memory without waiting."""
        moved = [x.to(device, non_blocking=True) for x in (self.ids, self.positions, self.labels, self.roles)]
        return PackedRows(*moved)

    def pin(self) -> PackedRows:
        return PackedRows(*(x.pin_memory() for x in (self.ids, self.positions, self.labels, self.roles)))


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Let float32 matrix products run in TF32 where the device has it; as before afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class PackedModel:
    """Runs the weights of a `Qwen3_5ForCausalLM` on packed rows, differentiably.

    Args:
        model: its modules; parameters stay float32.
        dtype: of the matrix products of layers and head; the recurrence is float32.
        compiled: compile layers and head (CUDA).
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32, *, compiled: bool = False) -> None:
        whole: Any = model
        self.model, self.decoder, self.config, self.dtype = whole, whole.model, whole.config, dtype
        parts = (delta_block, attention_block, mlp_block, head_loss)
        if compiled:
            parts = tuple(torch.compile(part, dynamic=False) for part in parts)  # type: ignore[assignment]
        self._delta, self._attention, self._mlp, self._head = parts

    def hidden(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Outputs of the last layer before the final norm, `[rows, width, hidden]` float32."""
        eps = self.config.rms_norm_eps
        hidden: Tensor = self.decoder.embed_tokens(ids)
        text = (positions == 0).cumsum(1)
        places = torch.arange(ids.shape[1], device=ids.device)
        seen = ((text[:, :, None] == text[:, None]) & (places[:, None] >= places)).unsqueeze(1)
        rotary = self.decoder.rotary_emb
        angles = positions.unsqueeze(-1).float() * rotary.inv_freq.float()
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(2)
        cos, sin = angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling
        for layer in self.decoder.layers:
            norm = layer.input_layernorm.weight
            if hasattr(layer, "linear_attn"):
                m = layer.linear_attn
                hidden = self._delta(
                    hidden, positions, self.dtype, eps, norm, m.in_proj_qkv.weight, m.in_proj_z.weight,
                    m.in_proj_a.weight, m.in_proj_b.weight, m.conv1d.weight, m.dt_bias, m.A_log, m.norm.weight,
                    m.out_proj.weight, m.num_k_heads, m.num_v_heads,
                )  # fmt: skip
            else:
                m = layer.self_attn
                hidden = self._attention(
                    hidden, seen, cos, sin, self.dtype, eps, norm, m.q_proj.weight, m.k_proj.weight, m.v_proj.weight,
                    m.q_norm.weight, m.k_norm.weight, m.o_proj.weight, m.scaling,
                )  # fmt: skip
            mlp = layer.mlp
            hidden = self._mlp(
                hidden, self.dtype, eps, layer.post_attention_layernorm.weight,
                mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight,
            )  # fmt: skip
        return hidden

    def loss(self, batch: PackedRows, other_weight: float) -> tuple[Tensor, Tensor, Tensor]:
        """The loss that is minimised (answers at weight 1, other tokens at `other_weight`), and mean loss and accuracy
        over answers alone, detached."""
        hidden = self.hidden(batch.ids, batch.positions)
        norm, head = self.decoder.norm.weight, self.model.lm_head.weight
        loss, own, accuracy = self._head(
            hidden, batch.labels, batch.roles, self.dtype, self.config.rms_norm_eps, norm, head, other_weight
        )
        return loss, own.detach(), accuracy.detach()


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Qwen3.5's RMSNorm, which scales by (1 + weight); float32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight)


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def delta_block(
    hidden: Tensor, positions: Tensor, dtype: torch.dtype, eps: float, norm: Tensor, qkv: Tensor, z: Tensor, a: Tensor,
    b: Tensor, conv: Tensor, dt_bias: Tensor, a_log: Tensor, gate_norm: Tensor, out: Tensor, key_heads: int, heads: int,
) -> Tensor:  # fmt: skip
    """A Gated-DeltaNet mixer with its norm and residual, `[rows, width, hidden]`."""
    rows, width, _ = hidden.shape
    inside = _normed(hidden, norm, eps).to(dtype)
    mixed = F.linear(inside, qkv.to(dtype))
    taps = conv.to(dtype).squeeze(1)
    convolved = mixed * taps[:, -1]
    for back in range(1, taps.shape[1]):
        earlier = F.pad(mixed, (0, 0, back, 0))[:, :width] * (positions >= back).unsqueeze(-1)
        convolved = convolved + earlier * taps[:, -1 - back]
    convolved = F.silu(convolved)
    values = out.shape[1]
    keys = (qkv.shape[0] - values) // 2
    query, key, value = torch.split(convolved, [keys, keys, values], dim=-1)
    query, key = query.reshape(rows, width, key_heads, -1), key.reshape(rows, width, key_heads, -1)
    g = -a_log.float().exp() * F.softplus(F.linear(inside, a.to(dtype)).float() + dt_bias)
    output = chunked_delta_rule(
        _unit(query) * query.shape[-1] ** -0.5,
        _unit(key),
        value.reshape(rows, width, heads, -1).float(),
        g.masked_fill((positions == 0).unsqueeze(-1), RESET),
        F.linear(inside, b.to(dtype)).sigmoid().float(),
    )
    output = output * torch.rsqrt(output.pow(2).mean(-1, keepdim=True) + eps) * gate_norm
    gate = F.linear(inside, z.to(dtype)).float()
    output = output.reshape(rows, width, -1) * F.silu(gate)
    return hidden + F.linear(output.to(dtype), out.to(dtype))


def attention_block(
    hidden: Tensor, seen: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, eps: float, norm: Tensor,
    q: Tensor, k: Tensor, v: Tensor, q_norm: Tensor, k_norm: Tensor, out: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """A gated softmax attention with its norm and residual; `seen` bool `[rows, 1, width, width]`."""
    rows, width, _ = hidden.shape
    size = q_norm.shape[0]
    inside = _normed(hidden, norm, eps).to(dtype)
    query, gate = F.linear(inside, q.to(dtype)).view(rows, width, -1, 2 * size).chunk(2, dim=-1)
    key = F.linear(inside, k.to(dtype)).view(rows, width, -1, size)
    value = F.linear(inside, v.to(dtype)).view(rows, width, -1, size)
    query = _rotated(_normed(query, q_norm, eps), cos, sin).to(dtype)
    key = _rotated(_normed(key, k_norm, eps), cos, sin).to(dtype)
    groups = query.shape[2] // key.shape[2]
    if groups > 1:  # the kernels that take a mask take no groups
        key, value = key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale)
    output = output.transpose(1, 2).reshape(rows, width, -1) * torch.sigmoid(gate.reshape(rows, width, -1))
    return hidden + F.linear(output, out.to(dtype))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on the first features of each head, `[rows, width, heads, size]`."""
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-second, first], dim=-1) * sin, kept], dim=-1)


def mlp_block(hidden: Tensor, dtype: torch.dtype, eps: float, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> (
    Tensor
):  # fmt: skip
    """A gated MLP with its norm and residual."""
    inside = _normed(hidden, norm, eps).to(dtype)
    opened = F.silu(F.linear(inside, gate.to(dtype))) * F.linear(inside, up.to(dtype))
    return hidden + F.linear(opened, down.to(dtype))


def head_loss(
    hidden: Tensor, labels: Tensor, roles: Tensor, dtype: torch.dtype, eps: float, norm: Tensor, head: Tensor,
    other_weight: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Weighted next-token loss, and mean loss and accuracy over answers."""
    logits = F.linear(_normed(hidden, norm, eps).to(dtype), head.to(dtype)).float().flatten(0, 1)
    losses = F.cross_entropy(logits, labels.flatten(), reduction="none")
    flat = roles.flatten()
    answers = (flat == ANSWER).float()
    weights = answers + other_weight * (flat == OTHER).float()
    count = answers.sum().clamp_min(1)
    right = (logits.argmax(-1) == labels.flatten()).float() * answers
    # Weights may all be zero: no answer in the batch, and other tokens do not count.
    loss = (losses * weights).sum() / weights.sum().clamp_min(1e-6)
    return loss, (losses * answers).sum() / count, right.sum() / count
