"""Every historical failure has its finding, and the shipped profiles have none that stops them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from drafthouse.serve.facts import Facts, Gpu, Resolution
from drafthouse.serve.findings import NOT_CHECKED, errors
from drafthouse.serve.preflight import preflight
from drafthouse.serve.profile import Profile
from tests.unit.serve import clean
from tests.unit.serve.clean import CPU, DFLASH, MTP, NAMES, VLLM_DFLASH, VLLM_MTP

Change = Callable[[dict[str, Any]], Any]


def judged(profile: Profile, change: Change | None = None) -> dict[str, str]:
    """Severity by id of what preflight finds on a clean node after `change` of its facts (as a dictionary)."""
    facts = clean.facts(profile).model_dump()
    if change is not None:
        change(facts)
    found = preflight(profile, Facts.model_validate(facts))
    assert all(finding.sentence and finding.fix and finding.source for finding in found)
    return {finding.id: finding.severity for finding in found if finding.id != NOT_CHECKED}


def put(path: str, value: Any) -> Change:
    """A change of one fact, by its path."""

    def change(facts: dict[str, Any]) -> None:
        *above, last = path.split("/")
        node = facts
        for part in above:
            node = node[part]
        node[last] = value

    return change


def drop(path: str) -> Change:
    """A change that takes one key away."""

    def change(facts: dict[str, Any]) -> None:
        *above, last = path.split("/")
        node = facts
        for part in above:
            node = node[part]
        del node[last]

    return change


TEXT = "model/config/text_config"
DRAFT = "draft/config"

# (finding, severity, profile, overrides, change of the facts)
HISTORY: list[tuple[str, str, str, tuple[str, ...], Change | None]] = [
    # versions and environments
    ("sglang-dense-tp-garbage", "error", MTP, ("engine.version=0.5.9",), put("engine/version", "0.5.9")),
    ("sglang-dense-tp-garbage", "error", MTP, (), put("engine/version", "0.5.9")),
    ("sglang-version-floor", "error", MTP, ("engine.version=0.5.12",), put("engine/version", "0.5.12")),
    ("sglang-version-floor", "error", MTP, ("engine.version=0.5.9", "tensor_parallel=1"), None),
    ("sglang-spec-v2-nonetype", "error", MTP, ("engine.version=0.5.14",), put("engine/version", "0.5.14")),
    ("engine-version-mismatch", "error", MTP, (), put("engine/version", "0.5.22")),
    ("uv-backtracks", "warning", MTP, (), put("engine/uv", "0.11.24")),
    ("engine-pins", "error", MTP, (), put("engine/packages/torch", "2.14.0")),
    ("engine-pins", "error", VLLM_MTP, (), put("engine/packages/xgrammar", "0.2.7")),
    ("engines-share-environment", "error", MTP, (), put("engine/packages/vllm", "0.33.0")),
    (
        "sglang-nvfp4-loops",
        "warning",
        MTP,
        ("engine.version=0.5.17",),
        put("model/config/quantization_config", {"quant_method": "nvfp4"}),
    ),
    # retired flags and variables
    ("flag-renamed", "warning", MTP, ("engine.extra_args.speculative-dflash-draft-window-size=2048",), None),
    ("flag-renamed", "warning", MTP, ("engine.extra_args.disable-piecewise-cuda-graph=true",), None),
    ("flag-dropped", "warning", MTP, ("engine.extra_args.enable-piecewise-cuda-graph=true",), None),
    ("flag-refused", "error", MTP, ("engine.extra_args.enforce-piecewise-cuda-graph=true",), None),
    ("flag-refused", "error", MTP, ("engine.extra_args.cuda-graph-max-bs=8",), None),
    ("flag-refused", "error", MTP, ("engine.extra_args.cuda-graph-bs=8",), None),
    ("flag-refused", "error", MTP, ("engine.extra_args.cuda-graph-backend-prefill=tc_piecewise",), None),
    ("flag-dropped", "warning", MTP, ("environment.SGLANG_ENABLE_SPEC_V2='1'",), None),
    ("flag-dropped", "warning", VLLM_MTP, ("engine.extra_args.mamba-cache-mode=align",), None),
    ("launch-line", "error", MTP, ("engine.extra_args.speculative-algorithm=MTP",), None),
    # speculation
    ("spec-triple-incomplete", "error", MTP, ("speculation.topk=null",), None),
    ("spec-triple-incomplete", "error", MTP, ("speculation.topk=null", "speculation.draft_tokens=null"), None),
    ("spec-triple-incomplete", "error", MTP, ("speculation.steps=null", "speculation.draft_tokens=null"), None),
    ("spec-triple-incomplete", "error", MTP, ("speculation.steps=null", "speculation.topk=null"), None),
    ("spec-triple-incomplete", "error", MTP, ("speculation.draft_tokens=null", "speculation.topk=2"), None),
    ("spec-triple-incomplete", "warning", MTP, ("speculation.draft_tokens=null",), None),
    ("spec-draft-tokens", "warning", MTP, ("speculation.draft_tokens=8",), None),
    ("requests-unstated", "warning", MTP, ("max_running_requests=null",), None),
    (
        "tree-page",
        "error",
        MTP,
        ("speculation.topk=4", "engine.page_size=16", "engine.attention_backend=trtllm_mha"),
        None,
    ),
    ("tree-trtllm", "error", MTP, ("speculation.topk=4", "engine.attention_backend=trtllm_mha"), None),
    ("dflash-cpu", "error", DFLASH, ("engine.device=cpu",), None),
    ("dflash-pipeline", "error", DFLASH, ("engine.pipeline_parallel=2",), None),
    ("dflash-forced", "warning", DFLASH, ("speculation.steps=3",), None),
    ("dflash-block-differs", "error", DFLASH, ("speculation.draft_tokens=8",), None),
    ("dflash-window", "error", DFLASH, ("speculation.window_size=8",), None),
    ("dflash-dp-lm-head", "error", DFLASH, ("engine.extra_args.enable-dp-attention=true",), None),
    (
        "dflash-text-only",
        "error",
        DFLASH,
        ("engine.version=0.5.17",),
        put("model/config/architectures", ["Qwen3_5ForCausalLM"]),
    ),
    ("mtp-tensors-missing", "error", MTP, (), put("model/tensor_names", ("lm_head.weight",))),
    ("mtp-tensors-missing", "error", VLLM_MTP, (), put("model/tensor_names", ("lm_head.weight",))),
    ("mtp-layers-missing", "error", MTP, (), drop(f"{TEXT}/mtp_num_hidden_layers")),
    ("vllm-chains-only", "error", VLLM_MTP, ("speculation.topk=4",), None),
    ("vllm-mtp-width", "warning", VLLM_MTP, ("speculation.steps=5",), None),
    ("vllm-drafts-without-nvlink", "warning", VLLM_MTP, (), None),
    ("vllm-prefix-cache-drafts", "warning", VLLM_MTP, ("engine.prefix_caching=true",), None),
    ("vllm-prefix-cache-drafts", "warning", VLLM_MTP, ("engine.prefix_caching=null",), None),
    ("vllm-prefix-cache-drafts", "error", VLLM_DFLASH, ("engine.prefix_caching=true",), None),
    ("vllm-dflash-taps", "error", VLLM_DFLASH, ("engine.version=0.20.1",), None),
    ("vllm-dflash-speculators", "warning", VLLM_DFLASH, (), put(f"{DRAFT}/speculators_model_type", "dflash")),
    ("vllm-cpu-prefix-cache", "error", CPU, ("engine.prefix_caching=null",), None),
    ("vllm-cpu-dtype", "error", CPU, ("model.dtype=float32",), None),
    ("vllm-cpu-grammar", "error", CPU, ("canary.json_schema=true",), None),
    ("vllm-cpu-grammar", "warning", CPU, (), None),
    # recurrent states
    ("no-buffer-overlap", "error", MTP, ("engine.mamba_radix_cache_strategy=no_buffer",), None),
    (
        "no-buffer-page",
        "error",
        MTP,
        ("engine.mamba_radix_cache_strategy=no_buffer", "engine.overlap_schedule=false", "engine.page_size=16"),
        None,
    ),
    (
        "no-buffer-trtllm",
        "error",
        MTP,
        ("engine.mamba_radix_cache_strategy=no_buffer", "engine.attention_backend=trtllm_mha"),
        None,
    ),
    ("track-interval-page", "error", MTP, ("engine.page_size=48",), None),
    ("track-interval-drafts", "error", MTP, ("engine.mamba_track_interval=2",), None),
    ("track-interval-drafts", "error", DFLASH, ("engine.mamba_track_interval=8",), None),
    (
        "extra-buffer-arch",
        "error",
        MTP,
        (),
        lambda facts: facts["model"]["config"].update(
            architectures=["Qwen3ForCausalLM"],
            text_config={k: v for k, v in clean.TEXT.items() if k != "full_attention_interval"},
        ),
    ),
    ("extra-buffer-cpu", "error", MTP, ("engine.device=cpu",), None),
    ("linear-attn-backend", "error", MTP, ("engine.linear_attn_backend=flashinfer",), None),
    (
        "linear-attn-backend",
        "warning",
        MTP,
        ("engine.linear_attn_backend=flashinfer", "engine.mamba_radix_cache_strategy=auto"),
        None,
    ),
    (
        "lazy-overlap",
        "error",
        MTP,
        ("engine.mamba_radix_cache_strategy=extra_buffer_lazy", "engine.overlap_schedule=false"),
        None,
    ),
    ("chunk-too-small", "warning", MTP, ("engine.chunked_prefill=32",), None),
    ("chunk-page", "error", MTP, ("engine.chunked_prefill=1000", "engine.page_size=16"), None),
    ("trtllm-mha-gpu", "error", MTP, ("engine.attention_backend=trtllm_mha",), None),
    (
        "flashinfer-gdn-state",
        "error",
        MTP,
        ("engine.linear_attn_decode_backend=flashinfer",),
        put("host/gpus", (Gpu(name="B200", memory_mib=183_359, compute_capability=(10, 0)),) * 2),
    ),
    (
        "backend-unstated",
        "warning",
        MTP,
        (),
        put("host/gpus", (Gpu(name="B200", memory_mib=183_359, compute_capability=(10, 0)),) * 2),
    ),
    ("replayssm-strategy", "error", MTP, ("engine.extra_args.enable-linear-replayssm=true",), None),
    ("replayssm-dflash", "error", DFLASH, ("engine.extra_args.enable-linear-replayssm-spec=true",), None),
    (
        "full-attention-interval",
        "error",
        MTP,
        (),
        lambda facts: facts["model"]["config"]["text_config"].update(
            full_attention_interval=None, layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 16
        ),
    ),
    # refused at start whatever the hardware
    ("served-name-colon", "error", MTP, ("model.served_name='qwen:27b'",), None),
    ("language-model-only", "error", MTP, ("engine.language_model_only=true",), None),
    ("prefill-graph-forced", "warning", MTP, ("engine.prefill_graph=breakable",), None),
    ("context-too-long", "error", MTP, ("context_length=300000",), None),
    ("context-too-long", "error", DFLASH, (), put(f"{DRAFT}/max_position_embeddings", 40_960)),
    # checkpoints
    ("model-unreadable", "error", MTP, (), put("model/problem", "there is no config.json in it")),
    ("model-incomplete", "error", MTP, (), put("model/missing_files", ("model-00007-of-00015.safetensors",))),
    ("model-incomplete", "error", MTP, (), put("model/tensor_names", ())),
    ("drafter-unreadable", "error", DFLASH, (), put("draft/problem", "model.safetensors is cut short")),
    (
        "draft-config-rewritten",
        "error",
        DFLASH,
        (),
        put("draft/rewritten", ("sliding_window: 2048 → None",)),
    ),
    ("draft-layer-types", "error", DFLASH, (), put(f"{DRAFT}/layer_types", ["full_attention"] * 4)),
    (
        "draft-sliding-window",
        "error",
        DFLASH,
        (),
        put(f"{DRAFT}/layer_types", ["sliding_attention"] * 4 + ["full_attention"]),
    ),
    ("draft-taps-missing", "error", DFLASH, (), put(f"{DRAFT}/dflash_config", {"mask_token_id": 248_070})),
    ("draft-taps-outside", "error", DFLASH, (), put(f"{DRAFT}/dflash_config/target_layer_ids", [1, 16, 64])),
    ("draft-taps-order", "error", DFLASH, (), put(f"{DRAFT}/dflash_config/target_layer_ids", [16, 1])),
    ("draft-rope-inherited", "error", DFLASH, (), put(f"{DRAFT}/partial_rotary_factor", 0.25)),
    (
        "draft-rope-inherited",
        "error",
        DFLASH,
        (),
        put(f"{DRAFT}/rope_parameters", {"rope_type": "default", "mrope_section": [11, 11, 10]}),
    ),
    ("draft-block-ambiguous", "error", DFLASH, (), put(f"{DRAFT}/block_size", 8)),
    ("draft-block-differs", "error", DFLASH, ("speculation.block_size=8",), None),
    (
        "draft-block-unknown",
        "warning",
        DFLASH,
        ("speculation.block_size=null",),
        lambda facts: (
            facts["draft"]["config"].pop("block_size"),
            facts["draft"]["config"]["dflash_config"].pop("block_size"),
        ),
    ),
    ("draft-hidden-size", "error", DFLASH, (), put(f"{DRAFT}/hidden_size", 4096)),
    ("draft-vocabulary", "error", DFLASH, (), put(f"{DRAFT}/vocab_size", 151_936)),
    ("draft-target-layers", "error", DFLASH, (), put(f"{DRAFT}/num_target_layers", 36)),
    ("draft-mask-token", "error", DFLASH, (), put(f"{DRAFT}/dflash_config/mask_token_id", 248_320)),
    ("draft-mask-token", "error", DFLASH, (), put(f"{DRAFT}/dflash_config/mask_token_id", 248_044)),
    ("draft-mask-token", "error", DFLASH, (), drop(f"{DRAFT}/dflash_config/mask_token_id")),
    # the node
    ("gpu-count", "error", MTP, (), lambda facts: facts["host"].update(gpus=facts["host"]["gpus"][:1])),
    ("gpu-mixed", "error", MTP, (), put("host/gpus", (Gpu(name="A"), Gpu(name="B")))),
    ("gpu-busy", "warning", MTP, (), put("host/gpus", (Gpu(name="A", memory_mib=49_140, free_mib=40_000),) * 2)),
    ("driver-too-old", "error", MTP, (), put("host/driver", "570.86.15")),
    ("driver-too-old", "error", VLLM_MTP, (), put("host/driver", "570.86.15")),
    ("p2p-broken", "error", MTP, (), put("host/p2p", False)),
    ("p2p-broken", "error", MTP, ("engine.custom_all_reduce=true",), put("host/p2p", False)),
    ("custom-all-reduce-pcie", "warning", MTP, ("engine.custom_all_reduce=true",), None),
    ("shm-small", "error", MTP, (), put("host/shm_bytes", 64 * 1024**2)),
    ("shm-container", "error", MTP, ("container.ipc_host=false",), None),
    ("memlock-low", "warning", MTP, ("container=null",), put("host/memlock_bytes", 8 * 1024**2)),
    ("nvcc-mismatch", "error", MTP, (), put("host/nvcc", "12.8")),
    ("glibc-too-old", "error", MTP, (), put("host/glibc", "2.31")),
    (
        "torchcodec-import",
        "error",
        MTP,
        (),
        put("engine/torchcodec", "OSError: libavutil.so.58: cannot open shared object file"),
    ),
    (
        "ffmpeg-missing",
        "error",
        MTP,
        (),
        lambda facts: (facts["host"].update(libavutil=()), facts["engine"].update(torchcodec="absent")),
    ),
    (
        "ffmpeg-missing",
        "error",
        MTP,
        (),
        lambda facts: (facts["host"].update(libavutil=(55,)), facts["engine"].update(torchcodec=None)),
    ),
    # memory
    ("memory-weights", "error", MTP, ("engine.mem_fraction_static=0.5",), None),
    ("memory-states", "error", DFLASH, ("engine.mem_fraction_static=0.6",), None),
    ("memory-context", "error", DFLASH, ("context_length=200000",), None),
    ("memory-concurrency", "warning", MTP, ("max_running_requests=48",), None),
    ("memory-concurrency", "warning", MTP, ("max_running_requests=null",), None),
    # habits
    ("revision-moves", "warning", MTP, (), None),
    ("health-timeout", "warning", MTP, ("health.timeout_s=10",), None),
    ("canary-off", "warning", MTP, ("canary.enabled=false",), None),
    ("canary-without-schema", "warning", MTP, ("canary.json_schema=false",), None),
    # the engine's own resolver
    (
        "resolver-refuses",
        "error",
        MTP,
        (),
        put("resolution", Resolution(version="0.5.23", error="AssertionError (mamba_hook.py:135)")),
    ),
    (
        "resolver-accepts",
        "note",
        MTP,
        (),
        put("resolution", Resolution(version="0.5.23", resolved={"page_size": 1})),
    ),
]


@pytest.mark.parametrize(
    ("finding", "severity", "name", "overrides", "change"),
    HISTORY,
    ids=[f"{number}-{row[0]}" for number, row in enumerate(HISTORY)],
)
def test_every_historical_failure_has_its_finding(
    finding: str, severity: str, name: str, overrides: tuple[str, ...], change: Change | None
) -> None:
    assert judged(clean.profile(name, *overrides), change).get(finding) == severity


def test_the_table_knows_every_rule() -> None:
    """A rule that no row triggers might never fire at all."""
    import re
    from pathlib import Path

    import drafthouse.serve

    room = Path(drafthouse.serve.__file__).parent
    text = "\n".join(path.read_text(encoding="utf-8") for path in [*room.glob("rules/*.py"), room / "preflight.py"])
    named = set(re.findall(r'(?:error|warning|make|Finding)\(\s*f?"([a-z0-9{}-]+)"', text))
    named |= {"draft-hidden-size", "draft-vocabulary", "draft-target-layers"}
    named = {id_ for id_ in named if "{" not in id_} - {"memory-estimate"}
    missing = named - {row[0] for row in HISTORY}
    assert len(named) > 70
    assert not missing


@pytest.mark.parametrize("name", NAMES)
class TestShipped:
    def test_nothing_stops_it_on_a_clean_node(self, name: str) -> None:
        profile = clean.profile(name)
        assert errors(preflight(profile, clean.facts(profile))) == []

    def test_what_is_not_known_is_said(self, name: str) -> None:
        profile = clean.profile(name)
        unknown = [finding for finding in preflight(profile, Facts()) if finding.id == NOT_CHECKED]
        said = " ".join(finding.sentence for finding in unknown)
        assert {finding.severity for finding in unknown} == {"note"}
        wanted = ["model's folder", "is installed", "packages"]
        if profile.draft:
            wanted.append("drafter's folder")
        if profile.engine.device == "cuda":
            wanted += ["GPUs", "driver", "P2P", "/dev/shm", "locked memory", "memory: "]
        if profile.engine.name == "sglang":
            wanted += ["glibc", "libavutil", "resolver", "CUDA compiler"]
        assert [word for word in wanted if word not in said] == []

    def test_errors_come_first(self, name: str) -> None:
        profile = clean.profile(name, "context_length=300000")
        order = [finding.severity for finding in preflight(profile, clean.facts(profile))]
        assert order == sorted(order, key=["error", "warning", "note"].index)
        assert order[0] == "error"


class TestNoFalseAlarm:
    """The way out that a finding names leads out."""

    @pytest.mark.parametrize(
        ("name", "overrides", "change", "gone"),
        [
            (
                MTP,
                ("engine.mamba_radix_cache_strategy=no_buffer", "engine.overlap_schedule=false"),
                None,
                "no-buffer-overlap",
            ),
            (MTP, ("environment.NCCL_P2P_DISABLE='1'",), put("host/p2p", False), "p2p-broken"),
            (
                MTP,
                ("context_length=300000", "environment.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN='1'"),
                None,
                "context-too-long",
            ),
            (MTP, ("engine.version=0.5.19",), put("host/driver", "570.86.15"), "driver-too-old"),
            (MTP, ("speculation={method: none}",), put("model/tensor_names", ("a",)), "mtp-tensors-missing"),
            (MTP, ("speculation={method: mtp}",), None, "spec-triple-incomplete"),
            (
                MTP,
                ("engine.device=cpu", "engine.mamba_radix_cache_strategy=no_buffer", "engine.overlap_schedule=false"),
                None,
                "extra-buffer-cpu",
            ),
            (MTP, ("engine.linear_attn_decode_backend=flashinfer",), None, "linear-attn-backend"),
            (CPU, ("speculation={method: none}", "engine.prefix_caching=true"), None, "vllm-cpu-prefix-cache"),
            (VLLM_MTP, (), put("host/nvlink", True), "vllm-drafts-without-nvlink"),
            (
                MTP,
                ("model.revision=0123456789abcdef0123456789abcdef01234567",),
                None,
                "revision-moves",
            ),
            (MTP, ("container.ipc_host=false", "container.shm_gib=16"), None, "shm-container"),
            (MTP, ("engine.mem_fraction_static=0.8", "max_running_requests=8"), None, "memory-concurrency"),
        ],
    )
    def test_the_fix_fixes(self, name: str, overrides: tuple[str, ...], change: Change | None, gone: str) -> None:
        assert gone not in judged(clean.profile(name, *overrides), change)

    def test_a_dense_model_has_no_recurrent_states_to_worry_about(self) -> None:
        profile = clean.profile(
            MTP, "engine.mamba_radix_cache_strategy=auto", "engine.page_size=48", "speculation={method: none}"
        )

        def dense(facts: dict[str, Any]) -> None:
            text = copy.deepcopy(clean.TEXT)
            del text["full_attention_interval"]
            facts["model"]["config"].update(architectures=["Qwen3ForCausalLM"], text_config=text)

        found = judged(profile, dense)
        assert "track-interval-page" not in found
        assert "full-attention-interval" not in found


def test_a_foreign_layout_is_not_judged_by_the_rules_of_dflash() -> None:
    profile = clean.profile(VLLM_DFLASH)
    facts = clean.facts(profile).model_dump()
    facts["draft"]["config"] = {"speculators_model_type": "dflash", "num_hidden_layers": 5}
    found = preflight(profile, Facts.model_validate(facts))
    assert errors(found) == []
    assert any("fits its target" in finding.sentence for finding in found if finding.id == NOT_CHECKED)


def test_facts_are_not_changed() -> None:
    profile = clean.profile(DFLASH)
    facts = clean.facts(profile)
    before = facts.model_dump_json()
    first = preflight(profile, facts)
    assert preflight(profile, facts) == first
    assert facts.model_dump_json() == before
