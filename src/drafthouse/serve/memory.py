"""What a profile needs of a GPU's memory, and the concurrency that is really left.

SGLang's split follows its own code (0.5.23: `arg_groups/memory_hook.py` for the static fraction,
`mem_cache/kv_cache_configurator.py` for state slots); vLLM's is utilisation minus weights minus a reserve, shared
by attention cache and one recurrent slot per drafted token and request. All figures are bytes on ONE GPU. They are
arithmetic, made before anything was loaded: trust the shape of the answer to some percent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drafthouse.serve.facts import FolderFacts, is_hybrid
from drafthouse.serve.launch import drafted_tokens
from drafthouse.serve.profile import Dflash, Eagle3, Mtp, Profile, Sglang, Vllm
from drafthouse.serve.shape import BYTES, Shape

MIB = 1024**2
# vLLM measures its peak by a profiling run and captures graphs on top; between 1 and 3 GiB for models of this size.
VLLM_RESERVE = 2 * 1024 * MIB
# CUDA context, libraries and NCCL buffers are there before SGLang measures what is free.
CUDA_CONTEXT = 700 * MIB
_SGLANG_RATIO = 0.9
_SPECULATIVE_REQUESTS = 48


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU, and what they allow.

    Attributes:
        total: the GPU's memory.
        fraction: share of it that weights and pools may take.
        weights, draft_weights: after division among GPUs.
        state_slot: recurrent state of one sequence.
        state_slots: slots that fit (SGLang: as it computes them; vLLM: those of the effective requests).
        state: all slots, and the copies that verifying drafts needs.
        kv_per_token: attention cache of target and drafter.
        kv_tokens: tokens that the pool holds; negative: nothing is left.
        requested: requests that the profile asks for, or the engine's default; None: no limit stated.
        effective: requests that really run at once.
        full_length: requests of the whole context that fit at once.
        reserve: part of `fraction` that is neither weights nor pools: context, activations, graphs.
        assumptions: what was guessed, as sentences.
    """

    total: int
    fraction: float
    weights: int
    draft_weights: int
    state_slot: int
    state_slots: int
    state: int
    kv_per_token: int
    kv_tokens: int
    requested: int | None
    effective: int
    full_length: int
    reserve: int
    assumptions: tuple[str, ...]

    @property
    def static(self) -> int:
        """Bytes that weights and pools may take."""
        return int(self.total * self.fraction)

    @property
    def left(self) -> int:
        """Bytes left for pools after weights."""
        return self.static - self.reserve - self.weights - self.draft_weights


def estimate(
    profile: Profile, model: FolderFacts | None, draft: FolderFacts | None, memory_mib: int
) -> MemoryEstimate | None:
    """The memory of one GPU of `memory_mib` under `profile`; None where the model's config is not known.

    Args:
        model, draft: facts of the folders; weights come from their headers, else from the config's shape.
    """
    config = model.config if model else None
    shape = Shape.of(config) if config else None
    if model is None or config is None or shape is None:
        return None
    assumptions: list[str] = []
    ranks, total = profile.tensor_parallel, memory_mib * MIB
    weights = _weights(profile, model, shape, assumptions) // profile.world_size
    draft_weights, draft_kv = _draft(profile, draft, ranks, assumptions)
    element = _element(profile.engine.kv_cache_dtype or profile.model.dtype)
    kv = shape.kv_bytes(ranks, element) + draft_kv
    if isinstance(profile.speculation, Mtp):
        kv += shape.mtp_kv_bytes(ranks, element)
    state_dtype = profile.engine.mamba_ssm_dtype or _state_dtype(config)
    slot = shape.state_bytes(ranks, BYTES[state_dtype]) if is_hybrid(config) else 0
    engine = profile.engine
    if isinstance(engine, Sglang):
        fraction = engine.mem_fraction_static or static_fraction(profile, config, memory_mib)
        if engine.mem_fraction_static is None:
            assumptions.append(f"static fraction {fraction:.3f} by SGLang's heuristic")
        reserve = int(CUDA_CONTEXT * fraction)
        left = int(total * fraction) - reserve - weights - draft_weights
        slots, state, requested, effective = _sglang_slots(profile, engine, slot, left)
    else:
        fraction = engine.gpu_memory_utilization or 0.9
        assumptions.append(f"{VLLM_RESERVE / 1024**3:.0f} GiB for activations and graphs")
        reserve = VLLM_RESERVE
        left = int(total * fraction) - reserve - weights - draft_weights
        slots, state, requested, effective = _vllm_slots(profile, engine, slot, kv, left)
    kv_tokens = (left - state) // kv if kv else 0
    full = kv_tokens // profile.context_length
    return MemoryEstimate(
        total=total,
        fraction=fraction,
        weights=weights,
        draft_weights=draft_weights,
        state_slot=slot,
        state_slots=slots,
        state=state,
        kv_per_token=kv,
        kv_tokens=kv_tokens,
        requested=requested,
        effective=max(0, effective),
        full_length=max(0, min(full, effective)),
        reserve=reserve,
        assumptions=tuple(assumptions),
    )


def static_fraction(profile: Profile, config: Mapping[str, Any], memory_mib: int) -> float:
    """`mem_fraction_static` as SGLang 0.5.23 chooses it when it is not told.

    Reserve in MiB: 512 + 1.5 a token of a prefill step + 128 a GPU + 2 a request of the largest decode graph + 8 a
    prefill graph; at least 10 GiB above 60 GiB. A vision tower takes a further share.
    """
    engine = profile.engine
    assert isinstance(engine, Sglang)
    tiers = ((20, 2048, 8), (35, 4096, 48), (60, 4096, 32), (90, 8192, 256), (160, 8192, 256))
    chunk, batch = next(((c, b) for limit, c, b in tiers if memory_mib < limit * 1024), (16_384, 512))
    chunk = engine.chunked_prefill or chunk
    requested = _sglang_requested(profile)
    batch = engine.decode_graph_max_batch or (min(batch, requested) if requested else batch)
    reserve = 512 + 1.5 * max(chunk, 2048) + profile.world_size * 128
    reserve += 2 * batch if engine.decode_graph != "disabled" else 0
    reserve += 8 * len(prefill_graph_sizes(chunk)) if engine.prefill_graph != "disabled" else 0
    if memory_mib > 60 * 1024:
        reserve = max(reserve, 10 * 1024)
    fraction = round((memory_mib - reserve) / memory_mib, 3)
    vision = config.get("vision_config")
    if isinstance(vision, Mapping) and not engine.language_model_only:
        # Its own rule looks for `num_hidden_layers`, which Qwen3.5's tower calls `depth`: 24 is then assumed.
        layers, hidden = vision.get("num_hidden_layers", 24), vision.get("hidden_size", 1024)
        complexity = layers * hidden**2 / (24 * 1024**2)
        fraction *= 0.95 * max(0.8, min(1.05, 1 - 0.1 * (complexity - 1)))
    return fraction


def prefill_graph_sizes(largest: int) -> list[int]:
    """Token counts that SGLang 0.5.23 captures prefill graphs for, up to `largest`."""
    steps = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, largest + 1, 512))
    return [size for start, stop, step in steps for size in range(start, stop, step) if size <= largest]


def _sglang_requested(profile: Profile) -> int | None:
    if profile.max_running_requests is not None:
        return profile.max_running_requests
    return _SPECULATIVE_REQUESTS if profile.speculates else None


def slots_per_request(engine: Sglang) -> int:
    """State slots that SGLang keeps a running request: its own, the prefix tree's and those being written."""
    if not engine.radix_cache:
        return 1
    # `auto` falls back to no_buffer when neither overlap nor paging wants snapshots, or the kernels lack them.
    wants = engine.overlap_schedule or (engine.page_size or 1) > 1
    auto_without = engine.mamba_radix_cache_strategy == "auto" and not wants
    triton = engine.linear_attn_backend in (None, "triton")
    if engine.mamba_radix_cache_strategy == "no_buffer" or auto_without or not triton:
        return 3
    if engine.mamba_radix_cache_strategy == "extra_buffer_lazy":
        return 4
    return 5 if engine.overlap_schedule else 4


def verify_width(profile: Profile) -> int:
    """Rows of the verify pass a request, the known token included; 0 without speculation.

    What the profile leaves open is what the engines choose: 3 steps for MTP and EAGLE-3, a block of 16 for DFlash.
    """
    spec = profile.speculation
    if isinstance(spec, (Mtp, Eagle3)):
        return (drafted_tokens(profile) or 3) + 1
    return (drafted_tokens(profile) or 15) + 1 if isinstance(spec, Dflash) else 0


def _sglang_slots(profile: Profile, engine: Sglang, slot: int, left: int) -> tuple[int, int, int | None, int]:
    """(slots, bytes of state, requested, effective) as `_handle_max_mamba_cache` solves for them."""
    requested = _sglang_requested(profile)
    limit = requested if requested is not None else 4096
    if slot == 0:
        return 0, 0, requested, limit
    width, per_request = verify_width(profile), slots_per_request(engine)
    if engine.max_mamba_cache_size is not None:
        slots = engine.max_mamba_cache_size
    elif not engine.radix_cache and requested is not None:
        slots = requested
    else:
        ratio = engine.mamba_full_memory_ratio or _SGLANG_RATIO
        budget = left * ratio / (1 + ratio) - slot * (1 + width)
        slots = int(budget // (slot * (1 + width / per_request)))
    slots = max(0, slots)
    effective = min(limit, slots // per_request)
    copies = (effective + 1) * width if width else 0
    return slots, (slots + 1 + copies) * slot, requested, effective


def _vllm_slots(profile: Profile, engine: Vllm, slot: int, kv: int, left: int) -> tuple[int, int, int | None, int]:
    """(slots, bytes of state, requested, effective): states and tokens come out of one pool of blocks."""
    requested = profile.max_running_requests
    limit = requested if requested is not None else 1024
    per_request = max(1, verify_width(profile)) * slot
    if per_request == 0:
        return 0, 0, requested, limit
    # Each request also needs room for at least one block of tokens, which vLLM pads to the size of a state.
    effective = max(0, min(limit, left // (per_request + slot)))
    return effective * max(1, verify_width(profile)), effective * per_request, requested, effective


def _weights(profile: Profile, model: FolderFacts, shape: Shape, assumptions: list[str]) -> int:
    """Bytes of the weights over all GPUs."""
    if model.weight_bytes is not None:
        bytes_ = model.weight_bytes
        if model.tensors and not isinstance(profile.speculation, Mtp):
            bytes_ -= sum(tensor.bytes for name, tensor in model.tensors.items() if name.startswith("mtp."))
        return bytes_
    assumptions.append("weights by the config's shape, without vision tower, in the profile's dtype")
    parameters = shape.parameters() + (shape.mtp_parameters() if isinstance(profile.speculation, Mtp) else 0)
    return parameters * BYTES[profile.model.dtype]


def _draft(profile: Profile, draft: FolderFacts | None, ranks: int, assumptions: list[str]) -> tuple[int, int]:
    """(weights, attention cache a token) of a drafter on one GPU."""
    spec = profile.speculation
    if not isinstance(spec, (Dflash, Eagle3)):
        return 0, 0
    if draft is None or draft.config is None:
        assumptions.append("the drafter is not counted: its folder is not known")
        return 0, 0
    if draft.weight_bytes is None:
        assumptions.append("the drafter's weights are not counted: their size is not known")
    config = draft.config
    element = _element(spec.kv_cache_dtype or profile.model.dtype)
    heads = max(1, int(config.get("num_key_value_heads", 1)) // ranks)
    head_dim = int(config.get("head_dim") or 128)
    cache = int(config.get("num_hidden_layers", 1)) * Shape.layer_kv_bytes(heads, head_dim, element)
    return (draft.weight_bytes or 0) // ranks, cache


def _element(dtype: str) -> int:
    return BYTES.get(dtype, 2)


def _state_dtype(config: Mapping[str, Any]) -> str:
    text = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else config
    assert isinstance(text, Mapping)
    wanted = text.get("mamba_ssm_dtype") or "float32"
    return wanted if wanted in BYTES else "float32"
