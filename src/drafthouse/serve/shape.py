"""The sizes of a served model that memory is made of, read from its config.json.

Checked against Qwen3.6-27B: 383.27 M parameters a GDN layer, 372.26 M a full-attention layer, 24.353 B in the
stack of 64, 1.2714 B in embedding and lm_head each, 64 KiB of attention cache a token and 146.8 MiB of recurrent
state a sequence (float32 state, bfloat16 convolution window), before they are divided among GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drafthouse.serve.facts import layer_types, text_config

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8": 1}
_GDN = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "kernel": "linear_conv_kernel_dim",
}


@dataclass(frozen=True)
class Shape:
    """Of a hybrid or dense target.

    Attributes:
        full, linear: number of layers of either kind.
        kv_heads, head_dim: of the full-attention layers.
        value_heads, key_heads, key_dim, value_dim, kernel: of the Gated-DeltaNet layers.
    """

    full: int
    linear: int
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool
    tied: bool
    mtp_layers: int
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    kernel: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape | None:
        """Read a config.json; None where it lacks what is needed (mixture-of-experts models among them)."""
        text = text_config(dict(config))
        if text.get("num_experts") or text.get("num_local_experts"):
            return None
        try:
            layers, hidden, heads = text["num_hidden_layers"], text["hidden_size"], text["num_attention_heads"]
            kinds = layer_types(dict(config)) or ("full_attention",) * layers
            linear = kinds.count("linear_attention")
            gdn = {name: text[key] for name, key in _GDN.items()} if linear else {}
            return cls(
                full=layers - linear,
                linear=linear,
                hidden=hidden,
                intermediate=text["intermediate_size"],
                vocabulary=text["vocab_size"],
                heads=heads,
                kv_heads=text.get("num_key_value_heads", heads),
                head_dim=text.get("head_dim") or hidden // heads,
                # Qwen3.5 gates its attention unless its config says otherwise.
                gated=bool(text.get("attn_output_gate", str(text.get("model_type", "")).startswith("qwen3_5"))),
                tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
                mtp_layers=text.get("mtp_num_hidden_layers") or 0,
                **gdn,
            )
        except (KeyError, TypeError):
            return None

    @property
    def conv_channels(self) -> int:
        """Channels of a GDN layer's convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def full_layer(self) -> int:
        """Parameters of one full-attention layer (norms left out: under 0.01 %)."""
        queries = self.heads * self.head_dim * (2 if self.gated else 1)
        attention = self.hidden * (queries + 2 * self.kv_heads * self.head_dim + self.heads * self.head_dim)
        return attention + self._feed_forward()

    def linear_layer(self) -> int:
        """Parameters of one Gated-DeltaNet layer."""
        values = self.value_heads * self.value_dim
        projections = self.hidden * (self.conv_channels + 2 * values + 2 * self.value_heads)
        return projections + self.conv_channels * self.kernel + self._feed_forward()

    def _feed_forward(self) -> int:
        return 3 * self.hidden * self.intermediate

    def parameters(self) -> int:
        """Of the language model: layers, embedding and lm_head; without MTP and vision tower."""
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.full * self.full_layer() + self.linear * self.linear_layer() + tables

    def mtp_parameters(self) -> int:
        """Of the MTP layers: a full-attention layer and the projection of two joined hidden states each."""
        return self.mtp_layers * (self.full_layer() + 2 * self.hidden * self.hidden)

    def kv_bytes(self, tensor_parallel: int, element: int) -> int:
        """Attention cache of one token on one GPU, bytes. Heads fewer than GPUs are replicated."""
        heads = max(1, self.kv_heads // tensor_parallel)
        return self.full * self.layer_kv_bytes(heads, self.head_dim, element)

    def mtp_kv_bytes(self, tensor_parallel: int, element: int) -> int:
        """What the MTP layers add to it."""
        heads = max(1, self.kv_heads // tensor_parallel)
        return self.mtp_layers * self.layer_kv_bytes(heads, self.head_dim, element)

    @staticmethod
    def layer_kv_bytes(heads: int, head_dim: int, element: int) -> int:
        """Keys and values of one layer for one token."""
        return 2 * heads * head_dim * element

    def state_bytes(self, tensor_parallel: int, state_element: int, window_element: int = 2) -> int:
        """Recurrent state and convolution window of one sequence on one GPU, bytes: one slot."""
        state = max(1, self.value_heads // tensor_parallel) * self.key_dim * self.value_dim * state_element
        window = self.conv_channels // tensor_parallel * (self.kernel - 1) * window_element
        return self.linear * (state + window)
