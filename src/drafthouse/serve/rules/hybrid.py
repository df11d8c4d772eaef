"""Gated-DeltaNet hybrids: recurrent states beside the attention cache."""

from __future__ import annotations

from collections.abc import Iterator

from drafthouse.serve.facts import Facts, architecture, is_hybrid, text_config
from drafthouse.serve.findings import Finding, error, warning
from drafthouse.serve.memory import verify_width
from drafthouse.serve.profile import Profile, Sglang, Vllm

_HOOK = "SGLang 0.5.23, mamba_hook"
_INTERVAL = 256


def check(profile: Profile, facts: Facts) -> Iterator[Finding]:
    """Findings about recurrent states and their cache."""
    config = facts.model.config if facts.model else None
    hybrid = config is None or is_hybrid(config)
    if isinstance(profile.engine, Sglang):
        yield from _sglang(profile, profile.engine, facts, hybrid)
    elif hybrid:
        yield from _vllm_cpu(profile, profile.engine)


def _sglang(profile: Profile, engine: Sglang, facts: Facts, hybrid: bool) -> Iterator[Finding]:
    strategy, config = engine.mamba_radix_cache_strategy, facts.model.config if facts.model else None
    if strategy.startswith("extra_buffer") and not hybrid:
        yield error(
            "extra-buffer-arch",
            f"{strategy} is for models with recurrent states; {architecture(config or {})} has none",
            "leave mamba_radix_cache_strategy out",
            _HOOK,
        )
    if not hybrid:
        return
    if engine.radix_cache:
        if strategy == "no_buffer":
            yield from _no_buffer(engine)
        else:
            yield from _extra_buffer(profile, engine, strategy)
    yield from _backends(profile, engine, facts)
    if config is not None and not text_config(config).get("full_attention_interval"):
        yield error(
            "full-attention-interval",
            "config.json lacks full_attention_interval, which SGLang's Qwen3.5 model reads (transformers drops it"
            " when it saves)",
            'write "full_attention_interval": 4 into (text_config of) config.json',
            "SGLang 0.5.17 on an H200; read in 0.5.23 too (models/qwen3_5.py)",
        )


def _no_buffer(engine: Sglang) -> Iterator[Finding]:
    if engine.overlap_schedule:
        yield error(
            "no-buffer-overlap",
            "no_buffer cannot run with the overlap schedule, and SGLang does not switch it off for you",
            "set overlap_schedule: false, or use extra_buffer",
            f"{_HOOK}; QwenLM/Qwen3.8#108",
        )
    if engine.page_size not in (None, 1):
        yield error("no-buffer-page", f"no_buffer needs page_size 1, not {engine.page_size}", "set page_size: 1", _HOOK)
    if engine.attention_backend == "trtllm_mha":
        yield error(
            "no-buffer-trtllm", "no_buffer does not work with trtllm_mha", "choose another attention_backend", _HOOK
        )


def _extra_buffer(profile: Profile, engine: Sglang, strategy: str) -> Iterator[Finding]:
    # `auto` becomes extra_buffer on GPUs with the triton kernels, and SGLang then makes the same demands.
    explicit = strategy != "auto"
    triton = engine.linear_attn_backend in (None, "triton")
    if engine.device == "cpu":
        yield error(
            "extra-buffer-cpu",
            "on a CPU SGLang has no state snapshots and its default strategy fails at start",
            "set mamba_radix_cache_strategy: no_buffer and overlap_schedule: false",
            _HOOK,
        )
        return
    if not triton:
        name = engine.linear_attn_backend
        make = error if explicit else warning
        yield make(
            "linear-attn-backend",
            f"linear_attn_backend {name} "
            + (f"does not support {strategy}" if explicit else "silently costs extra_buffer and the overlap schedule"),
            f"set linear_attn_decode_backend: {name} instead and leave linear_attn_backend out",
            "SGLang 0.5.23, supports_mamba_cache_extra_buffer",
        )
        return
    interval, width, page = engine.mamba_track_interval or _INTERVAL, verify_width(profile), engine.page_size
    if interval < width:
        yield error(
            "track-interval-drafts",
            f"states are tracked every {interval} tokens, but {width} are verified at once",
            f"set mamba_track_interval to {width} or more",
            _HOOK,
        )
    if page and interval % page:
        yield error(
            "track-interval-page",
            f"the track interval of {interval} tokens is no multiple of the page of {page}",
            "choose a page_size that divides it (1, 16, 64, …)",
            _HOOK,
        )
    if strategy == "extra_buffer_lazy" and not engine.overlap_schedule:
        yield error(
            "lazy-overlap",
            "extra_buffer_lazy needs the overlap schedule",
            "set overlap_schedule: true or use extra_buffer",
            "SGLang 0.5.23, kv_cache_configurator",
        )
    if engine.chunked_prefill is not None and engine.chunked_prefill < max(64, page or 1):
        yield warning(
            "chunk-too-small",
            f"prefill steps of {engine.chunked_prefill} tokens are shorter than a chunk of the GDN kernel, so no"
            " states are kept for prefixes",
            "set chunked_prefill to 2048 or more",
            _HOOK,
        )


def _backends(profile: Profile, engine: Sglang, facts: Facts) -> Iterator[Finding]:
    capability = _capability(profile, facts)
    if engine.attention_backend == "trtllm_mha" and capability and capability[0] not in (9, 10, 12):
        yield error(
            "trtllm-mha-gpu",
            f"trtllm_mha runs on compute capability 9, 10 and 12, not {capability[0]}.{capability[1]}",
            "set attention_backend: flashinfer",
            "SGLang 0.5.23, attention_hook",
        )
    flashinfer = "flashinfer" in (engine.linear_attn_backend, engine.linear_attn_decode_backend)
    if flashinfer and capability and capability[0] == 10 and engine.mamba_ssm_dtype != "bfloat16":
        yield error(
            "flashinfer-gdn-state",
            "FlashInfer's GDN kernels on compute capability 10 need bfloat16 states",
            "set mamba_ssm_dtype: bfloat16",
            "SGLang 0.5.23",
        )
    if profile.speculation.method == "mtp" and engine.attention_backend is None and capability and capability[0] == 10:
        yield warning(
            "backend-unstated",
            "with NEXTN on this GPU SGLang has fallen back to triton with page 1 without a word (2.6 times slower"
            " at 12k tokens)",
            "state attention_backend",
            "sgl-project/sglang#39515",
        )
    if engine.extra_args.get("enable-linear-replayssm") and engine.mamba_radix_cache_strategy != "no_buffer":
        yield error(
            "replayssm-strategy",
            "enable-linear-replayssm needs no_buffer",
            "set mamba_radix_cache_strategy: no_buffer and overlap_schedule: false, or leave it out",
            "SGLang 0.5.23, attention_hook",
        )
    if engine.extra_args.get("enable-linear-replayssm-spec") and profile.speculation.method == "dflash":
        yield error(
            "replayssm-dflash",
            "replayed states with DFLASH need a KDA model; Gated DeltaNet is refused",
            "leave enable-linear-replayssm-spec out",
            "SGLang 0.5.23, kv_cache_configurator; PR #36683 (open)",
        )


def _capability(profile: Profile, facts: Facts) -> tuple[int, int] | None:
    if facts.host.gpus and facts.host.gpus[0].compute_capability:
        return facts.host.gpus[0].compute_capability
    return profile.hardware.compute_capability


def _vllm_cpu(profile: Profile, engine: Vllm) -> Iterator[Finding]:
    if engine.device == "cpu" and profile.model.dtype not in ("bfloat16", "auto"):
        yield error(
            "vllm-cpu-dtype",
            f"vLLM's CPU kernels for GDN take bfloat16 only; {profile.model.dtype} dies at the first request",
            "set model.dtype: bfloat16",
            "vllm-cpu 0.32.0: CPU GDN attention requires BF16",
        )
