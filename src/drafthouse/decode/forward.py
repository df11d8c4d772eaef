"""One pass of the target over a forest of new tokens, without touching what it remembers until commit.

Transformers' hybrid cache cannot roll back a recurrent state, and knows no trees. So the layers of the loaded
model are run here: the modules and weights are transformers', the token mixing is ours (checked against
transformers' own forward in tests). Autoregressive decoding, chains and trees are the same pass over different
forests, which is what makes their greedy text comparable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafthouse.decode import gdn
from drafthouse.decode.state import AttentionState, DeltaState, LayerState, TargetState, scatter_rows
from drafthouse.decode.topology import Topology
from drafthouse.errors import TargetError
from drafthouse.target import Target

# Prefill runs as chains of this many tokens: the triangular system of a GDN layer is this wide.
PREFILL_CHUNK = 64


@dataclass(frozen=True)
class AttentionInputs:
    """Keys and values of the pass `[rows, kv_heads, T, head_dim]`, rotated."""

    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class DeltaPass:
    """What a GDN layer keeps of a pass until commit; mixed: convolution inputs `[rows, T, channels]`."""

    mixed: Tensor
    inputs: gdn.DeltaInputs
    updates: Tensor


@dataclass(frozen=True)
class Pass:
    """The result of `Stepper.forward`.

    Attributes:
        hidden: outputs of the last decoder layer before the final norm `[rows, T, hidden]`.
        taps: outputs of the tapped layers `[rows, T, taps, hidden]`.
    """

    topology: Topology
    hidden: Tensor
    taps: Tensor
    kept: list[AttentionInputs | DeltaPass]


class Stepper:
    """Runs a target over forests of tokens and commits accepted paths.

    Args:
        target: the model; float32 for exactness checks.
        layer_ids: decoder layers whose outputs the drafter reads.
    """

    def __init__(self, target: Target, layer_ids: Sequence[int] = ()) -> None:
        target.check_layer_ids(layer_ids)
        unknown = set(target.layer_types) - {"linear_attention", "full_attention"}
        if unknown:
            raise TargetError(
                f"layer type {sorted(unknown)[0]} cannot be decoded here",
                fix="use a target of full attention",
            )
        self.target = target
        self.layer_ids = tuple(layer_ids)

    def new_state(self, rows: int, capacity: int) -> TargetState:
        """An empty memory for `rows` texts of at most `capacity` tokens."""
        target, device = self.target, self.target.device
        layers: list[LayerState] = []
        for layer, kind in zip(target.layers, target.layer_types, strict=True):
            module: Any = layer
            if kind == "linear_attention":
                mixer = module.linear_attn
                window = (rows, mixer.conv_kernel_size - 1, mixer.conv_dim)
                recurrent = (rows, mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim)
                layers.append(
                    DeltaState(
                        torch.zeros(window, dtype=target.dtype, device=device),
                        torch.zeros(recurrent, dtype=torch.float32, device=device),
                    )
                )
            else:
                mixer = module.self_attn
                heads = mixer.k_proj.out_features // mixer.head_dim
                shape = (rows, heads, capacity + 1, mixer.head_dim)
                layers.append(
                    AttentionState(
                        torch.zeros(shape, dtype=target.dtype, device=device),
                        torch.zeros(shape, dtype=target.dtype, device=device),
                    )
                )
        return TargetState(layers, torch.zeros(rows, dtype=torch.int64, device=device), capacity)

    @torch.no_grad()
    def forward(self, state: TargetState, tokens: Tensor, topology: Topology, committed: int | None = None) -> Pass:
        """Run nodes `tokens` `[rows, T]` behind the committed text; `state` is only read.

        Args:
            committed: slots of the caches to look at; None: as many as the longest row holds, which is asked of the
                device.
        """
        hidden = self.target.embed(tokens)
        positions = state.lengths.unsqueeze(1) + topology.depth
        cos, sin = self._rotation(positions)
        mask = _attention_mask(state.lengths, topology, committed)
        taps: list[Tensor] = []
        kept: list[AttentionInputs | DeltaPass] = []
        for index, module in enumerate(self.target.layers):
            layer: Any = module
            memory = state.layers[index]
            inside = layer.input_layernorm(hidden)
            passed: AttentionInputs | DeltaPass
            if isinstance(memory, DeltaState):
                mixed, passed = _delta(layer.linear_attn, inside, memory, topology)
            else:
                mixed, passed = _attention(layer.self_attn, inside, memory, cos, sin, mask)
            kept.append(passed)
            hidden = hidden + mixed
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            if index in self.layer_ids:
                taps.append(hidden)
        stacked = torch.stack(taps, dim=2) if taps else hidden.new_empty(*hidden.shape[:2], 0, hidden.shape[2])
        return Pass(topology, hidden, stacked, kept)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin `[rows, T, rotary_dim]` of text positions `[rows, T]`.

        Computed from the model's own frequencies: what its rotary module wants as positions (one axis, or three
        for images) differs between releases, and for text the three are equal.
        """
        rotary: Any = self.target.decoder.rotary_emb
        angles = positions.unsqueeze(-1).float() * rotary.inv_freq.float()
        angles = torch.cat([angles, angles], dim=-1)
        scale, dtype = rotary.attention_scaling, self.target.dtype
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits `[..., vocab]` of pre-norm states `[..., hidden]`."""
        return self.target.lm_head(self.target.final_norm(hidden)).float()

    @torch.no_grad()
    def commit(self, state: TargetState, passed: Pass, path: Tensor, counts: Tensor, *, exact: bool = True) -> None:
        """Make the first `counts` `[rows]` nodes of `path` `[rows, P]` part of the committed text, in place.

        Args:
            exact: replay the recurrent states step by step (decoding); otherwise fold them (prefill).
        """
        row = torch.arange(state.rows, device=counts.device)
        leaf = torch.where(counts > 0, path[row, (counts - 1).clamp_min(0)], -1)
        for memory, kept in zip(state.layers, passed.kept, strict=True):
            if isinstance(memory, DeltaState) and isinstance(kept, DeltaPass):
                history = memory.window.shape[1]
                rows_of_inputs = torch.cat([memory.window, kept.mixed], dim=1)
                order = torch.cat(
                    [torch.arange(history, device=path.device).expand(state.rows, -1), path + history], dim=1
                )
                last = counts.unsqueeze(1) + torch.arange(history, device=path.device)
                picked = order.gather(1, last)
                memory.window = rows_of_inputs[row.unsqueeze(1), picked]
                if exact:
                    memory.recurrent = gdn.replay(kept.inputs, memory.recurrent, path, counts)
                else:
                    memory.recurrent = gdn.fold(kept.inputs, kept.updates, memory.recurrent, passed.topology, leaf)
            elif isinstance(memory, AttentionState) and isinstance(kept, AttentionInputs):
                scatter_rows(memory.key, kept.key, state.lengths, path, counts)
                scatter_rows(memory.value, kept.value, state.lengths, path, counts)
        state.lengths = state.lengths + counts

    @torch.no_grad()
    def prefill(self, state: TargetState, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Commit right-padded texts `[rows, seq]` of `lengths` `[rows]` to an empty state.

        Returns:
            Pre-norm state of each row's last token `[rows, hidden]`, and taps `[rows, seq, taps, hidden]`.
        """
        rows, seq = tokens.shape
        last = torch.zeros(rows, self.target.hidden_size, dtype=self.target.dtype, device=tokens.device)
        taps = []
        for start in range(0, seq, PREFILL_CHUNK):
            chunk = tokens[:, start : start + PREFILL_CHUNK]
            width = chunk.shape[1]
            passed = self.forward(state, chunk, Topology.chain(rows, width, tokens.device))
            counts = (lengths - start).clamp(0, width)
            path = torch.arange(width, device=tokens.device).expand(rows, width)
            self.commit(state, passed, path, counts, exact=False)
            ends = (counts > 0) & (lengths <= start + width)
            at = (counts - 1).clamp_min(0)
            row = torch.arange(rows, device=tokens.device)
            last = torch.where(ends.unsqueeze(1), passed.hidden[row, at], last)
            taps.append(passed.taps)
        return last, torch.cat(taps, dim=1)


def _attention_mask(lengths: Tensor, topology: Topology, committed: int | None) -> Tensor:
    """Bool mask `[rows, 1, T, committed + T]`: all committed tokens of the row, then the node's own path."""
    if committed is None:
        committed = int(lengths.max()) if lengths.numel() else 0
    before = torch.arange(committed, device=lengths.device) < lengths.unsqueeze(1)
    before = before.unsqueeze(1).expand(-1, topology.length, -1)
    return torch.cat([before, topology.visible], dim=-1).unsqueeze(1)


def _attention(
    mixer: Any, hidden: Tensor, memory: AttentionState, cos: Tensor, sin: Tensor, mask: Tensor
) -> tuple[Tensor, AttentionInputs]:
    rows, length, _ = hidden.shape
    heads_shape = (rows, length, -1, mixer.head_dim)
    projected = mixer.q_proj(hidden)
    heads = mixer.o_proj.in_features // mixer.head_dim
    gate = None
    if projected.shape[-1] == 2 * heads * mixer.head_dim:
        # Qwen3.5's output gate lies beside each head's query.
        projected, gate = projected.view(rows, length, heads, 2 * mixer.head_dim).chunk(2, dim=-1)
        gate = gate.reshape(rows, length, -1)
    query = mixer.q_norm(projected.reshape(heads_shape)).transpose(1, 2)
    key = mixer.k_norm(mixer.k_proj(hidden).view(heads_shape)).transpose(1, 2)
    value = mixer.v_proj(hidden).view(heads_shape).transpose(1, 2)
    query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
    committed = mask.shape[-1] - length
    keys = torch.cat([memory.key[:, :, :committed], key], dim=2)
    values = torch.cat([memory.value[:, :, :committed], value], dim=2)
    output = F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=mixer.scaling, enable_gqa=heads != keys.shape[1]
    )
    output = output.transpose(1, 2).reshape(rows, length, -1)
    if gate is not None:
        output = output * torch.sigmoid(gate)
    return mixer.o_proj(output), AttentionInputs(key, value)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on the first `cos.shape[-1]` features of each head (Qwen3.5 rotates a quarter of them)."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, kept], dim=-1)


def _delta(mixer: Any, hidden: Tensor, memory: DeltaState, topology: Topology) -> tuple[Tensor, DeltaPass]:
    rows, length, _ = hidden.shape
    mixed = mixer.in_proj_qkv(hidden)
    inputs_of_conv = torch.cat([memory.window, mixed], dim=1)
    width = mixer.conv_kernel_size
    if topology.is_chain:
        convolved = F.conv1d(inputs_of_conv.transpose(1, 2), mixer.conv1d.weight, groups=mixer.conv_dim)
        convolved = convolved.transpose(1, 2)
    else:
        row = torch.arange(rows, device=hidden.device)[:, None, None]
        windows = inputs_of_conv[row, topology.window(width)]
        convolved = (windows * mixer.conv1d.weight.squeeze(1).t()).sum(dim=2)
    convolved = F.silu(convolved)
    query, key, value = torch.split(convolved, [mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
    query = query.reshape(rows, length, -1, mixer.head_k_dim).float()
    key = key.reshape(rows, length, -1, mixer.head_k_dim).float()
    value = value.reshape(rows, length, -1, mixer.head_v_dim).float()
    inputs = gdn.DeltaInputs(
        query=_unit(query) * mixer.head_k_dim**-0.5,
        key=_unit(key),
        value=value,
        g=-mixer.A_log.float().exp() * F.softplus(mixer.in_proj_a(hidden).float() + mixer.dt_bias),
        beta=mixer.in_proj_b(hidden).sigmoid().float(),
    )
    output, updates = gdn.forest_forward(inputs, memory.recurrent, topology)
    output = output.to(hidden.dtype).reshape(-1, mixer.head_v_dim)
    gate = mixer.in_proj_z(hidden).reshape(-1, mixer.head_v_dim)
    output = mixer.norm(output, gate).reshape(rows, length, -1)
    return mixer.out_proj(output), DeltaPass(mixed, inputs, updates)


def _unit(x: Tensor) -> Tensor:
    """L2 norm with the epsilon that the reference implementation puts under the root."""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)
