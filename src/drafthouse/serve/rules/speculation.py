"""Drafting: what each engine accepts, what it silently changes, and what crashes later."""

from __future__ import annotations

from collections.abc import Iterator

from drafthouse.serve.facts import Facts, architecture, is_hybrid, text_config
from drafthouse.serve.findings import Finding, error, warning
from drafthouse.serve.launch import drafted_tokens
from drafthouse.serve.profile import Dflash, Eagle3, Mtp, Profile, Sglang, Vllm
from drafthouse.serve.versions import before

_HOOK = "SGLang 0.5.23, speculative_hook"
TREE_BACKENDS = ("flashinfer", "fa3", "triton")


def check(profile: Profile, facts: Facts) -> Iterator[Finding]:
    """Findings about speculation."""
    if not profile.speculates:
        return
    if isinstance(profile.engine, Sglang):
        yield from _sglang(profile, profile.engine, facts)
    else:
        yield from _vllm(profile, profile.engine, facts)
    if isinstance(profile.speculation, Mtp):
        yield from _mtp_weights(facts)


def _sglang(profile: Profile, engine: Sglang, facts: Facts) -> Iterator[Finding]:
    spec = profile.speculation
    if isinstance(spec, (Mtp, Eagle3)):
        yield from _triple(spec, engine)
    if isinstance(spec, Dflash):
        yield from _dflash(profile, spec, engine, facts)
    if profile.max_running_requests is None:
        yield warning(
            "requests-unstated",
            "SGLang sets 48 running requests with speculation and then cuts them down to what the state cache holds",
            "state max_running_requests (see the memory estimate)",
            _HOOK,
        )


def _triple(spec: Mtp | Eagle3, engine: Sglang) -> Iterator[Finding]:
    given = {"steps": spec.steps, "topk": spec.topk, "draft_tokens": spec.draft_tokens}
    absent = [name for name, value in given.items() if value is None]
    if absent and len(absent) < 3:
        # 0.5.23 completes a chain that lacks draft_tokens alone; every other gap is a crash at start.
        completed = spec.topk == 1 and absent == ["draft_tokens"]
        crash = "TypeError: '>' not supported" if spec.steps is not None else "AssertionError"
        make = warning if completed else error
        yield make(
            "spec-triple-incomplete",
            f"SGLang wants all three of steps, topk and draft_tokens or none; {' and '.join(absent)}"
            f" {'is' if len(absent) == 1 else 'are'} missing"
            + (" (0.5.23 fills it in)" if completed else f" ({crash} at start)"),
            "give all three, e.g. steps: 3, topk: 1, draft_tokens: 4, or none of them",
            "sgl-project/sglang PR #34361 (open), #22895 (closed)",
        )
        return
    if spec.steps is None or spec.topk is None or spec.draft_tokens is None:
        return
    if spec.topk == 1 and spec.draft_tokens != spec.steps + 1:
        yield warning(
            "spec-draft-tokens",
            f"with topk 1 SGLang verifies steps + 1 = {spec.steps + 1} tokens, not {spec.draft_tokens}",
            f"set draft_tokens: {spec.steps + 1}",
            _HOOK,
        )
    if spec.topk > 1 and (engine.page_size or 1) > 1 and engine.attention_backend not in (None, *TREE_BACKENDS):
        yield error(
            "tree-page",
            f"a tree (topk {spec.topk}) on pages of {engine.page_size} works with {', '.join(TREE_BACKENDS)} only",
            "set page_size: 1 or one of these attention backends",
            _HOOK,
        )
    if spec.topk > 1 and engine.attention_backend == "trtllm_mha":
        yield error("tree-trtllm", "trtllm_mha verifies chains only (topk 1)", "set topk: 1", _HOOK)


def _dflash(profile: Profile, spec: Dflash, engine: Sglang, facts: Facts) -> Iterator[Finding]:
    if engine.device == "cpu":
        yield error(
            "dflash-cpu", "SGLang has no DFLASH on a CPU", "serve with vLLM's CPU build, or without drafts", _HOOK
        )
    if engine.pipeline_parallel != 1:
        yield error(
            "dflash-pipeline",
            f"SGLang's DFLASH needs pipeline_parallel 1, not {engine.pipeline_parallel}",
            "use tensor parallelism instead",
            _HOOK,
        )
    if spec.steps not in (None, 1) or spec.topk not in (None, 1):
        yield warning(
            "dflash-forced",
            "DFLASH drafts a block in one pass: SGLang sets steps and topk to 1 whatever is given",
            "leave steps and topk out",
            _HOOK,
        )
    block = spec.block_size
    if block is not None and spec.draft_tokens is not None and block != spec.draft_tokens:
        yield error(
            "dflash-block-differs",
            f"block_size {block} and draft_tokens {spec.draft_tokens} are the same thing for DFLASH and differ",
            "leave draft_tokens out",
            _HOOK,
        )
    width = block or spec.draft_tokens or 16
    if spec.window_size is not None and spec.window_size < width:
        yield error(
            "dflash-window",
            f"the drafter's window of {spec.window_size} keys is smaller than its block of {width}",
            f"set window_size to {width} or more",
            _HOOK,
        )
    config = facts.model.config if facts.model else None
    if config is not None and architecture(config) == "Qwen3_5ForCausalLM" and before(engine.version, "0.5.23"):
        yield error(
            "dflash-text-only",
            "the text-only Qwen3_5ForCausalLM cannot be tapped for DFLASH before SGLang 0.5.23",
            "serve the multimodal wrapper (Qwen3_5ForConditionalGeneration), or use SGLang 0.5.23",
            "SGLang 0.5.17 on an H200: set_dflash_layers_to_capture is missing",
        )


def _vllm(profile: Profile, engine: Vllm, facts: Facts) -> Iterator[Finding]:
    spec, tokens = profile.speculation, drafted_tokens(profile)
    assert isinstance(spec, (Mtp, Dflash, Eagle3))
    if spec.topk not in (None, 1):
        yield error(
            "vllm-chains-only",
            f"vLLM verifies chains only; topk {spec.topk} asks for a tree",
            "set topk: 1 or leave it out",
            "vllm-project/vllm#42121, #42910",
        )
    if isinstance(spec, Dflash):
        yield from _vllm_dflash(engine, facts)
    config = facts.model.config if facts.model else None
    if config is not None and not is_hybrid(config):
        return
    yield from _vllm_prefix_cache(engine, tokens)
    if engine.device == "cpu":
        yield from _vllm_cpu_grammar(profile)
        return
    if isinstance(spec, Mtp) and tokens is not None and tokens > 3:
        yield warning(
            "vllm-mtp-width",
            f"{tokens} MTP tokens a round: from 4 on vLLM has written outside its buffers on long sequences, above 4"
            " FlashInfer's GDN kernel faults, and 4 were slower than 3",
            "set steps: 3",
            "vllm-project/vllm#40756 (open), #37035",
        )
    if profile.tensor_parallel > 1 and not profile.hardware.nvlink and facts.host.nvlink is not True:
        yield warning(
            "vllm-drafts-without-nvlink",
            "drafting on GDN hybrids over two cards without NVLink has crashed at the first request"
            " (num_accepted_tokens_event)",
            "run the canary before traffic; fall back to SGLang or to no drafts when it fails",
            "vllm-project/vllm#41190",
        )


def _vllm_prefix_cache(engine: Vllm, tokens: int | None) -> Iterator[Finding]:
    if engine.prefix_caching is False:
        return
    how = "on" if engine.prefix_caching else "on by default"
    if engine.device == "cpu":
        yield error(
            "vllm-cpu-prefix-cache",
            f"prefix caching is {how}, and vLLM's CPU build has no kernel for it together with drafts on GDN hybrids:"
            " the engine dies at the first request",
            "set prefix_caching: false",
            "vllm-cpu 0.32.0: precopy_mamba_align_fused_kernel",
        )
        return
    wide = tokens is None or tokens > 4
    make = error if wide else warning
    yield make(
        "vllm-prefix-cache-drafts",
        f"prefix caching is {how}: with drafts on GDN hybrids it has read outside its buffers (Xid 31), asserted for"
        " wide blocks, and cost 20 % accuracy",
        "set prefix_caching: false" + (" (or draft 4 tokens or fewer)" if wide else ""),
        "vllm-project/vllm PR #50021 (open), #43559, #42084",
    )


def _vllm_cpu_grammar(profile: Profile) -> Iterator[Finding]:
    make = error if profile.canary.enabled and profile.canary.json_schema else warning
    yield make(
        "vllm-cpu-grammar",
        "on a CPU one request with a JSON schema kills an engine that drafts on a GDN hybrid: the grammar cuts drafts"
        " short, and the kernel wants them all of one length",
        "set canary.json_schema: false and let no client ask for structured output, or speculation: {method: none}",
        "vllm-cpu 0.32.0: _spec_forward in gdn_attention.py, size mismatch",
    )


def _vllm_dflash(engine: Vllm, facts: Facts) -> Iterator[Finding]:
    # Both fixes came after 0.20.1; no release in between is known to be right, and 0.32 is known to be.
    if before(engine.version, "0.32"):
        yield error(
            "vllm-dflash-taps",
            f"vLLM {engine.version}: releases up to 0.20.1 read target layers one too early and ran sliding layers as"
            " full attention (acceptance near 1 %); none before 0.32 is known to be right",
            "use vLLM 0.33.0",
            "vllm-project/vllm#40727, #40898",
        )
    config = facts.draft.config if facts.draft else None
    if config is not None and "speculators_model_type" in config:
        yield warning(
            "vllm-dflash-speculators",
            "drafters in the speculators layout have shown no acceptance at all on model runner V2",
            "export the drafter in the DFlash layout, and look at the canary's acceptance length",
            "vllm-project/vllm#49559 (open), #56692 (open)",
        )


def _mtp_weights(facts: Facts) -> Iterator[Finding]:
    model = facts.model
    if model is None:
        return
    if model.config is not None and not text_config(model.config).get("mtp_num_hidden_layers"):
        yield error(
            "mtp-layers-missing",
            "config.json has no mtp_num_hidden_layers, so there is no layer to draft with",
            "use the original checkpoint, or speculation none or dflash",
            "SGLang 0.5.23 and vLLM 0.33.0 (qwen3_5 MTP)",
        )
    if model.tensor_names is not None and not any(name.startswith("mtp.") for name in model.tensor_names):
        yield error(
            "mtp-tensors-missing",
            "the checkpoint holds no mtp.* tensors: quantised and fine-tuned copies often drop them",
            "use a checkpoint that has them, or speculation none or dflash",
            "SGLang 0.5.23 and vLLM 0.33.0 (qwen3_5 MTP)",
        )
