"""What of a model's config.json decides the bytes and FLOPs of a decode step: parameters, cache, state.

Numbers of parameters count the matrices and convolutions; norms and gates' biases (under 0.01 %) are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drafthouse.measure.roofline.errors import RooflineError

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Attention:
    """Softmax attention of some decoder layers; `windows` holds, for each, how many keys it sees (None: all)."""

    heads: int
    kv_heads: int
    head_dim: int
    gated: bool
    windows: tuple[int | None, ...]

    @property
    def layers(self) -> int:
        return len(self.windows)

    def parameters(self, hidden: int, inputs: int | None = None) -> int:
        """Of one layer: projections of queries (and their gate), keys, values and output.

        Args:
            inputs: width of what queries, keys and values read; `hidden` when None.
        """
        queries = self.heads * self.head_dim * (2 if self.gated else 1)
        read = (inputs or hidden) * (queries + 2 * self.kv_heads * self.head_dim)
        return read + self.heads * self.head_dim * hidden

    def cache_bytes(self, tensor_parallel: int, element: float) -> float:
        """Keys and values of one token in one layer on one GPU; heads fewer than GPUs are replicated."""
        return 2 * -(-self.kv_heads // tensor_parallel) * self.head_dim * element

    def keys_seen(self, context: int) -> int:
        """Keys that one query meets, summed over the layers."""
        return sum(context if window is None else min(window, context) for window in self.windows)

    def flops(self, keys: int) -> int:
        """Of one query against `keys` keys, all heads: scores and weighted values."""
        return 4 * self.heads * self.head_dim * keys


@dataclass(frozen=True)
class DeltaNet:
    """Gated-DeltaNet layers (arXiv 2412.06464) as Qwen3.5, 3.6 and 3.8 build them."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    state_dtype: str

    @property
    def channels(self) -> int:
        """Of the causal convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def parameters(self, hidden: int) -> int:
        """Of one layer: q, k, v, z, a, b, the convolution and the output."""
        values = self.value_heads * self.value_dim
        return hidden * (self.channels + 2 * values + 2 * self.value_heads) + self.channels * self.kernel

    def state_bytes(self, element: float, window_element: float) -> float:
        """Recurrent state and convolution window of one sequence, all layers and heads."""
        state = self.value_heads * self.key_dim * self.value_dim * element
        return self.layers * (state + self.channels * (self.kernel - 1) * window_element)

    def row_bytes(self, window_element: float) -> float:
        """What must be kept of one token to replay it: key, value, decay and write strength, all layers."""
        per_head = self.key_heads * self.key_dim + self.value_heads * self.value_dim
        return self.layers * (per_head * window_element + 2 * self.value_heads * 4)

    def flops(self) -> int:
        """Of one token, all layers: decay (1), read by key (2), rank-one write (2), read by query (2)."""
        return self.layers * self.value_heads * self.key_dim * self.value_dim * 7


@dataclass(frozen=True)
class Shape:
    """A dense or GDN-hybrid target."""

    hidden: int
    vocabulary: int
    intermediate: int
    tied: bool
    mtp_layers: int
    attention: Attention
    deltanet: DeltaNet | None

    @classmethod
    def of(cls, config: Config) -> Shape:
        """Read a config.json (with or without `text_config`).

        Raises:
            RooflineError: a mixture of experts, whose bytes depend on the routing, or a key is missing.
        """
        nested = config.get("text_config")
        text: Config = nested if isinstance(nested, Mapping) else config
        if text.get("num_experts") or text.get("num_local_experts"):
            raise RooflineError(
                "is a mixture of experts, whose bytes a step depend on the routing",
                where="the model's config.json",
                fix="give the config.json of a dense or Gated-DeltaNet hybrid model",
            )
        kinds = _layer_kinds(text)
        linear = sum(kind == "linear_attention" for kind in kinds)
        windows = tuple(_window(text, kind) for kind in kinds if kind != "linear_attention")
        return cls(
            hidden=_whole(text, "hidden_size"),
            vocabulary=_whole(text, "vocab_size"),
            intermediate=_whole(text, "intermediate_size"),
            tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            mtp_layers=int(text.get("mtp_num_hidden_layers") or 0),
            attention=_attention(text, windows),
            deltanet=_deltanet(text, linear) if linear else None,
        )

    @property
    def layers(self) -> int:
        return self.attention.layers + (self.deltanet.layers if self.deltanet else 0)

    @property
    def feed_forward(self) -> int:
        """Parameters of one SwiGLU: gate, up and down."""
        return 3 * self.hidden * self.intermediate

    @property
    def stack(self) -> int:
        """Parameters of all decoder layers."""
        mixers = self.attention.layers * self.attention.parameters(self.hidden)
        if self.deltanet:
            mixers += self.deltanet.layers * self.deltanet.parameters(self.hidden)
        return mixers + self.layers * self.feed_forward

    @property
    def table(self) -> int:
        """Parameters of the embedding, and of lm_head."""
        return self.vocabulary * self.hidden

    @property
    def mtp(self) -> int:
        """Parameters of the MTP layers: attention, feed-forward, projection of embedding and hidden state."""
        layer = self.attention.parameters(self.hidden) + self.feed_forward
        return self.mtp_layers * (layer + 2 * self.hidden * self.hidden)


@dataclass(frozen=True)
class DraftShape:
    """A drafter with its own weights: DFlash (arXiv 2602.06036) or EAGLE-3 (arXiv 2503.01840).

    Attributes:
        parameters: read by one pass, the projection of tapped states included, lm_head not.
        table: parameters of the lm_head that it uses: the target's, or its own smaller one.
        block: tokens of a DFlash block, the known one included; 0 for EAGLE-3.
    """

    parameters: int
    table: int
    attention: Attention
    block: int

    @classmethod
    def dflash(cls, config: Config, target: Shape) -> DraftShape:
        own = config.get("dflash_config")
        nested: Config = own if isinstance(own, Mapping) else {}
        taps = nested.get("target_layer_ids") or config.get("target_layer_ids") or ()
        if not taps:
            raise RooflineError("has no target_layer_ids", where="the drafter's config.json", fix="give a DFlash one")
        windows = tuple(_window(config, kind) for kind in _layer_kinds(config))
        attention, hidden = _attention(config, windows), _whole(config, "hidden_size")
        layer = attention.parameters(hidden) + 3 * hidden * _whole(config, "intermediate_size")
        joined = len(taps) * target.hidden * hidden
        block = config.get("block_size") or nested.get("block_size")
        return cls(attention.layers * layer + joined, target.table, attention, int(block or 16))

    @classmethod
    def eagle3(cls, config: Config, target: Shape) -> DraftShape:
        """Its layer reads embedding and hidden state side by side; three tapped states are projected to one."""
        windows = tuple(_window(config, kind) for kind in _layer_kinds(config))
        attention, hidden = _attention(config, windows), _whole(config, "hidden_size")
        layer = attention.parameters(hidden, inputs=2 * hidden) + 3 * hidden * _whole(config, "intermediate_size")
        vocabulary = int(config.get("draft_vocab_size") or target.vocabulary)
        joined = 3 * target.hidden * hidden
        return cls(attention.layers * layer + joined, vocabulary * hidden, attention, 0)


def _layer_kinds(text: Config) -> tuple[str, ...]:
    """Kind of every layer; from `layer_types`, else from `full_attention_interval`, else all full."""
    number = _whole(text, "num_hidden_layers")
    if kinds := text.get("layer_types"):
        if len(kinds) != number:
            raise RooflineError(
                f"has {len(kinds)} layer_types for {number} layers", where="config.json", fix="correct one of them"
            )
        return tuple(map(str, kinds))
    interval = text.get("full_attention_interval")
    if not interval:
        return ("full_attention",) * number
    return tuple("linear_attention" if (place + 1) % interval else "full_attention" for place in range(number))


def _window(text: Config, kind: str) -> int | None:
    window = text.get("sliding_window")
    return int(window) if kind == "sliding_attention" and window else None


def _attention(text: Config, windows: tuple[int | None, ...]) -> Attention:
    heads = _whole(text, "num_attention_heads")
    head_dim = text.get("head_dim") or _whole(text, "hidden_size") // heads
    # Qwen3.5 gates its attention unless its config says otherwise.
    gated = text.get("attn_output_gate", str(text.get("model_type", "")).startswith("qwen3_5"))
    return Attention(heads, int(text.get("num_key_value_heads") or heads), int(head_dim), bool(gated), windows)


def _deltanet(text: Config, layers: int) -> DeltaNet:
    return DeltaNet(
        layers=layers,
        key_heads=_whole(text, "linear_num_key_heads"),
        value_heads=_whole(text, "linear_num_value_heads"),
        key_dim=_whole(text, "linear_key_head_dim"),
        value_dim=_whole(text, "linear_value_head_dim"),
        kernel=_whole(text, "linear_conv_kernel_dim"),
        state_dtype=str(text.get("mamba_ssm_dtype") or "float32"),
    )


def _whole(text: Config, key: str) -> int:
    value = text.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RooflineError(
            f"'{key}' is {value!r}, not a positive whole number",
            where="config.json",
            fix="give the config.json of a dense or Gated-DeltaNet hybrid model",
        )
    return value
