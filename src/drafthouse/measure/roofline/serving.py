"""How a model is served, as far as it decides what one decode step moves and computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from drafthouse.config import Settings

# Bits of one weight, scales of its group included: AWQ/GPTQ int4 one float16 scale and a zero point in 128; NVFP4
# one FP8 scale in 16 and MXFP4 one 8-bit exponent in 32.
WEIGHT_BITS: Mapping[str, float] = {
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "fp8": 8,
    "int8": 8,
    "int4": 4 + 20 / 128,
    "nvfp4": 4.5,
    "mxfp4": 4.25,
}
ELEMENT_BYTES: Mapping[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
WeightType = Literal["float32", "bfloat16", "float16", "fp8", "int8", "int4", "nvfp4", "mxfp4"]
CacheType = Literal["float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"]
StateType = Literal["float32", "bfloat16", "float16"]


class Serving(Settings):
    """One decode step of one engine. A round is a draft, one pass of the target over all nodes, and acceptance."""

    tensor_parallel: int = Field(1, ge=1, description="GPUs that share every matrix")
    context: int = Field(4096, ge=0, description="tokens that each request has in its cache")
    batch: int = Field(1, ge=1, description="requests that are decoded together")
    weights: WeightType = Field("bfloat16", description="of the layers' matrices")
    lm_head: WeightType | None = Field(
        None, description="of lm_head; none: as the weights, but bfloat16 if they are quantised"
    )
    kv_cache: CacheType | None = Field(None, description="none: the activations' type")
    state: StateType | None = Field(None, description="of recurrent states; none: the model's config decides")
    draft: Literal["none", "mtp", "dflash", "eagle3"] = "none"
    steps: int | None = Field(None, ge=1, description="draft passes a round (mtp, eagle3); none: 3")
    width: int | None = Field(None, ge=1, description="nodes that the target verifies, the known token included")
    tree: bool = Field(False, description="the nodes are a tree: a node's state begins with its parent's")
    state_update: Literal["snapshots", "replay"] = Field(
        "snapshots", description="a state is stored for every node, or the accepted path is run once more"
    )
    acceptance: float | None = Field(
        None, ge=1, description="tokens a round, the target's own included; none: all drafts accepted"
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.draft == "none" and (self.steps or self.width not in (None, 1) or self.acceptance not in (None, 1)):
            raise ValueError("steps, width and acceptance above 1 need a draft: mtp, dflash or eagle3")
        if self.draft == "dflash" and self.steps not in (None, 1):
            raise ValueError("DFlash drafts a whole block in one pass: leave out steps")
        if self.tree and self.draft == "none":
            raise ValueError("a tree needs a draft: mtp, dflash or eagle3")
        return self

    @property
    def activation_bytes(self) -> int:
        """Of one number between layers."""
        return 4 if self.weights == "float32" else 2

    @property
    def lm_head_type(self) -> str:
        """Quantised checkpoints of this model family keep lm_head in bfloat16."""
        return self.lm_head or (self.weights if WEIGHT_BITS[self.weights] >= 16 else "bfloat16")

    @property
    def kv_bytes(self) -> int:
        return ELEMENT_BYTES[self.kv_cache] if self.kv_cache else self.activation_bytes

    @property
    def draft_passes(self) -> int:
        """Passes of the drafter in one round."""
        return {"none": 0, "dflash": 1}.get(self.draft, self.steps or 3)
