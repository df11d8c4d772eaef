"""What a DFlash drafter is: its shape, the target it belongs to, and the config.json that engines read.

The layout written by `to_hf_dict` is the one of the published DFlash checkpoints with every choice spelled
out, because readers disagree about what an absent key means:

* `block_size` stands at the top level and inside `dflash_config` (SGLang and vLLM look in different places);
* `layer_types`, `use_sliding_window` and `max_window_layers` are explicit: transformers' Qwen3Config drops
  `sliding_window` when `use_sliding_window` is absent and derives layer types when `layer_types` is;
* `rope_theta` with `rope_scaling: null` and `rope_parameters` both stand, for older and newer readers;
* `target_layer_ids` count OUTPUTS of decoder layers from 0; engines add their own offset;
* `is_causal` is left out when layer types are mixed (the engines' default, sliding causal and full
  bidirectional, is how we train) and written when all layers are of one type.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from drafthouse.config import Settings
from drafthouse.errors import DrafterError

LayerType = Literal["full_attention", "sliding_attention"]
FULL: LayerType = "full_attention"
SLIDING: LayerType = "sliding_attention"

ARCHITECTURE = "DFlashDraftModel"

# Fields that stand under their own name at the top level of config.json.
_SAME_NAME = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)


def default_target_layer_ids(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Evenly spaced taps between layer 1 and layer L-3, the rule shared by z-lab, SpecForge, SGLang and
    ModelOpt.

    Args:
        num_target_layers: L, the decoder layers of the target.
        count: how many taps.

    Returns:
        `count` 0-based ids of layer outputs. For targets too shallow for the rule they are not unique;
        `DrafterConfig` refuses them then.
    """
    if count == 1:
        return (num_target_layers // 2,)
    start, end = 1, num_target_layers - 3
    return tuple(round(start + i * (end - start) / (count - 1)) for i in range(count))


class DrafterConfig(Settings):
    """A DFlash drafter (arXiv 2602.06036): Qwen3-style layers over a context made from K target layer
    outputs.

    Embedding and lm_head are the target's and are no part of the drafter.
    """

    hidden_size: int = Field(gt=0, description="width H, equal to the target's")
    intermediate_size: int = Field(gt=0, description="width of the SwiGLU feed-forward")
    num_hidden_layers: int = Field(gt=0, description="depth of the drafter")
    num_attention_heads: int = Field(gt=0, description="query heads")
    num_key_value_heads: int = Field(gt=0, description="key/value heads, a divisor of the query heads")
    head_dim: int = Field(gt=0, description="width of one head; even (rotary pairs); need not be H / heads")
    block_size: int = Field(default=16, ge=2, description="B: slot 0 is the known token, slots 1..B-1 are drafted")
    target_layer_ids: tuple[int, ...] = Field(
        default=(),
        description="taps: 0-based ids of decoder layers whose OUTPUT is read; empty: DFlash's default rule",
    )
    num_target_layers: int = Field(gt=0, description="L, decoder layers of the target")
    vocab_size: int = Field(gt=0, description="the target's vocabulary")
    mask_token_id: int = Field(ge=0, description="an unused id of the target's vocabulary")
    layer_types: tuple[LayerType, ...] = Field(default=(), description="per layer; empty: every layer full_attention")
    sliding_window: int | None = Field(
        default=None, gt=0, description="W: a query of a sliding layer sees keys at positions > its own - W"
    )
    rope_theta: float = Field(default=10_000_000.0, gt=0, description="rotary base, over the full head")
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    max_position_embeddings: int = Field(default=262_144, gt=0)
    target_identity: str = Field(default="", description="sha256 of the target's weights and config; empty: unknown")
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_rules(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        values = dict(data)
        layers, depth = values.get("num_target_layers"), values.get("num_hidden_layers")
        if not values.get("target_layer_ids") and isinstance(layers, int) and isinstance(depth, int):
            values["target_layer_ids"] = default_target_layer_ids(layers, depth)
        if not values.get("layer_types") and isinstance(depth, int):
            values["layer_types"] = (FULL,) * depth
        return values

    @model_validator(mode="after")
    def _possible(self) -> Self:
        ids, layers = self.target_layer_ids, self.num_target_layers
        if any(b <= a for a, b in pairwise(ids)):
            raise ValueError(
                f"target_layer_ids must be unique and strictly increasing, not {list(ids)} "
                f"(a target of {layers} layers may be too shallow for the default rule: name the ids)"
            )
        outside = [i for i in ids if not 0 <= i < layers]
        if outside:
            raise ValueError(f"target_layer_ids {outside} are out of range: the target has layers 0 to {layers - 1}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even: rotary embedding turns pairs")
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers but num_hidden_layers is {self.num_hidden_layers}"
            )
        if SLIDING in self.layer_types and self.sliding_window is None:
            raise ValueError("layer_types has sliding_attention layers, so sliding_window must be set")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is outside the target's vocabulary of {self.vocab_size}"
            )
        return self

    @property
    def num_taps(self) -> int:
        """K, the number of target layers read."""
        return len(self.target_layer_ids)

    def to_hf_dict(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """The content of config.json: one layout for SGLang (>= 0.5.23) and vLLM (>= 0.33).

        Args:
            dtype: name of the dtype that the weights are stored in.
        """
        has_sliding = SLIDING in self.layer_types
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "dflash_config": {
                "block_size": self.block_size,
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
            "num_target_layers": self.num_target_layers,
            "num_hidden_layers": self.num_hidden_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": self.rms_norm_eps,
            "initializer_range": 0.02,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window if has_sliding else None,
            "use_sliding_window": has_sliding,
            "max_window_layers": self.num_hidden_layers,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "dtype": dtype,
            "use_cache": True,
        }
        if len(set(self.layer_types)) == 1:
            config["is_causal"] = has_sliding
        if self.target_identity:
            config["drafthouse"] = {"target_identity": self.target_identity}
        return config

    @classmethod
    def from_hf_dict(cls, config: Mapping[str, Any], where: str = "config.json") -> DrafterConfig:
        """Read a config.json of the DFlash layout, ours or z-lab's.

        Raises:
            DrafterError: a key is missing, or says something that our mask and rotation do not do.
        """
        _refuse_foreign(config, where)
        dflash = config.get("dflash_config") or {}

        def either(key: str) -> Any:
            return dflash.get(key, config.get(key))

        rope = config.get("rope_parameters") or {}
        values: dict[str, Any] = {
            "block_size": either("block_size"),
            "mask_token_id": either("mask_token_id"),
            "target_layer_ids": either("target_layer_ids") or (),
            "num_target_layers": either("num_target_layers"),
            "rope_theta": config.get("rope_theta", rope.get("rope_theta")),
            "sliding_window": config.get("sliding_window"),
            "layer_types": config.get("layer_types") or (),
            "target_identity": (config.get("drafthouse") or {}).get("target_identity", ""),
            "eos_token_id": config.get("eos_token_id"),
            "pad_token_id": config.get("pad_token_id"),
        }
        values.update({key: config.get(key) for key in _SAME_NAME})
        may_be_none = ("sliding_window", "eos_token_id", "pad_token_id")
        missing = sorted(key for key, value in values.items() if value is None and key not in may_be_none)
        if missing:
            raise DrafterError(f"the drafter config lacks {', '.join(missing)}", where=where, fix="export it again")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            message = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in message["loc"])
            text = message["msg"].removeprefix("Value error, ")
            raise DrafterError(f"{key}: {text}" if key else text, where=where, fix="export it again") from None


class DrafterShape(Settings):
    """The part of a drafter config that a run file chooses; the rest follows from the target."""

    num_hidden_layers: int = Field(default=2, gt=0, description="depth of the drafter")
    intermediate_size: int | None = Field(default=None, gt=0, description="feed-forward width; none: 3 H")
    num_attention_heads: int = Field(default=4, gt=0)
    num_key_value_heads: int = Field(default=2, gt=0)
    head_dim: int = Field(default=32, gt=0)
    block_size: int = Field(default=8, ge=2, description="B: 1 known token and B-1 drafted ones")
    target_layer_ids: tuple[int, ...] = Field(default=(), description="taps; empty: the default rule of DFlash")
    layer_types: tuple[LayerType, ...] = Field(default=(), description="empty: all full_attention")
    sliding_window: int | None = Field(default=None, gt=0)
    rope_theta: float = Field(default=10_000_000.0, gt=0)

    def for_target(
        self,
        *,
        hidden_size: int,
        vocab_size: int,
        num_layers: int,
        mask_token_id: int,
        identity: str = "",
        max_position_embeddings: int = 262_144,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
    ) -> DrafterConfig:
        """The complete config of a drafter of this shape for the target described.

        Raises:
            DrafterError: the shape does not fit the target, e.g. a tap beyond its last layer.
        """
        values = self.model_dump(exclude={"intermediate_size"})
        values |= {
            "hidden_size": hidden_size,
            "intermediate_size": self.intermediate_size or 3 * hidden_size,
            "vocab_size": vocab_size,
            "num_target_layers": num_layers,
            "mask_token_id": mask_token_id,
            "target_identity": identity,
            "max_position_embeddings": max_position_embeddings,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
        }
        try:
            return DrafterConfig.model_validate(values)
        except ValidationError as error:
            text = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
            raise DrafterError(text, where="drafter", fix="change the drafter section of the run file") from None


def _refuse_foreign(config: Mapping[str, Any], where: str) -> None:
    """Name the first thing in `config` that this drafter would compute differently from what it says."""
    dflash = config.get("dflash_config") or {}
    rope = config.get("rope_parameters") or {}
    types = tuple(config.get("layer_types") or (FULL,))
    wrong: str | None = None
    if config.get("architectures") != [ARCHITECTURE]:
        wrong = f"architectures is {config.get('architectures')}, not ['{ARCHITECTURE}']"
    elif config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) != 1.0:
        wrong = "partial_rotary_factor is set, but a DFlash drafter turns the full head"
    elif config.get("rope_scaling") or rope.get("rope_type", "default") != "default" or "mrope_section" in rope:
        wrong = "rope_scaling or a rope_type other than 'default' is set"
    elif SLIDING in types and not config.get("sliding_window"):
        wrong = "layer_types has sliding_attention but sliding_window is null (rewritten by another program?)"
    elif SLIDING in types and not config.get("use_sliding_window", False):
        wrong = "layer_types has sliding_attention but use_sliding_window is not true, which drops the window"
    elif config.get("attention_bias"):
        wrong = "attention_bias is true, but a DFlash drafter has no biases"
    else:
        causal = config.get("is_causal", dflash.get("causal"))
        if causal is not None and any((kind == SLIDING) != bool(causal) for kind in types):
            wrong = f"is_causal {causal} contradicts layer_types (sliding is causal, full is bidirectional)"
    if wrong:
        raise DrafterError(wrong, where=where, fix="use the config.json that the export wrote")
