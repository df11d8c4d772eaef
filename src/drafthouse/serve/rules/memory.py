"""Whether weights, states and context fit, and how many requests really run."""

from __future__ import annotations

from collections.abc import Iterator

from drafthouse.serve.facts import Facts
from drafthouse.serve.findings import Finding, error, not_checked, warning
from drafthouse.serve.memory import MemoryEstimate, estimate
from drafthouse.serve.profile import Profile, Sglang

_GIB = 1024**3
_SOURCE = "SGLang 0.5.23, kv_cache_configurator; vLLM 0.33.0"


def memory_estimate(profile: Profile, facts: Facts) -> MemoryEstimate | None:
    """The estimate for the node's smallest GPU, else for the profile's; None where it cannot be made."""
    if profile.engine.device != "cuda":
        return None
    known = [gpu.memory_mib for gpu in (facts.host.gpus or ())[: profile.world_size] if gpu.memory_mib]
    memory = min(known) if known else profile.hardware.memory_mib
    return estimate(profile, facts.model, facts.draft, memory) if memory else None


def check(profile: Profile, facts: Facts) -> Iterator[Finding]:
    """Findings about memory."""
    if profile.engine.device != "cuda":
        return
    found = memory_estimate(profile, facts)
    if found is None:
        yield not_checked("memory: the model's config or the GPU's size is not known", "give --model FOLDER")
        return
    yield from judge(profile, found)


def judge(profile: Profile, found: MemoryEstimate) -> Iterator[Finding]:
    """Findings about one estimate."""
    sglang = isinstance(profile.engine, Sglang)
    fraction = "engine.mem_fraction_static" if sglang else "engine.gpu_memory_utilization"
    if found.left <= 0:
        smallest = (found.weights + found.draft_weights + found.reserve) / found.total
        yield error(
            "memory-weights",
            f"weights take {(found.weights + found.draft_weights) / _GIB:.1f} GiB a GPU, {fraction} allows"
            f" {found.static / _GIB:.1f} GiB",
            f"raise {fraction} above {smallest:.2f}, use more GPUs, or a quantised checkpoint",
            _SOURCE,
        )
        return
    if found.state_slot and found.effective < 1:
        yield error(
            "memory-states",
            f"no request fits: one recurrent state takes {found.state_slot / _GIB:.3f} GiB and each request needs"
            " several",
            "set mamba_ssm_dtype: bfloat16, lower max_running_requests or draft fewer tokens",
            _SOURCE,
        )
        return
    if found.kv_tokens < profile.context_length:
        yield error(
            "memory-context",
            f"the attention cache holds {max(0, found.kv_tokens)} tokens, less than one request of"
            f" {profile.context_length}",
            f"lower context_length, raise {fraction}"
            + (", or lower engine.mamba_full_memory_ratio" if sglang and found.state_slot else ""),
            _SOURCE,
        )
    if found.requested is not None and found.effective < found.requested:
        yield warning(
            "memory-concurrency",
            f"{found.requested} requests are asked for, {found.effective} really run at once: recurrent states take"
            f" {found.state_slot / 1024**2:.0f} MiB each on a GPU" + (" and SGLang only warns" if sglang else ""),
            f"set max_running_requests: {found.effective}"
            + (", raise mamba_full_memory_ratio, or set mamba_ssm_dtype: bfloat16" if sglang else ""),
            _SOURCE,
        )
    yield Finding(
        "memory-estimate",
        "note",
        f"a GPU of {found.total / _GIB:.1f} GiB: weights {found.weights / _GIB:.1f}, drafter"
        f" {found.draft_weights / _GIB:.1f}, recurrent states {found.state / _GIB:.1f}, attention cache"
        f" {found.kv_tokens * found.kv_per_token / _GIB:.1f} GiB for {found.kv_tokens:,} tokens; {found.effective}"
        f" requests at once, {found.full_length} of them with the whole context",
        "; ".join(found.assumptions) or "nothing was assumed",
        _SOURCE,
    )
