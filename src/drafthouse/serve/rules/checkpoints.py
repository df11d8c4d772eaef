"""The model's folder, and a drafter that must fit it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drafthouse.serve.facts import Facts, FolderFacts, text_config
from drafthouse.serve.findings import Finding, error, not_checked, warning
from drafthouse.serve.profile import Dflash, Profile, Sglang

_ROPE = "speculators#613, #733, #1050; DeepSpec#71, #72"
_LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"


def check(profile: Profile, facts: Facts) -> Iterator[Finding]:
    """Findings about weights and configs."""
    model, draft = facts.model, facts.draft
    if model is None:
        yield not_checked(f"the model's folder ({profile.model.path})", "give --model FOLDER with a downloaded copy")
    else:
        yield from _whole("model", model)
        if model.config is not None:
            yield from _context(profile, "model", model.config)
    if profile.draft is None:
        return
    if draft is None:
        yield not_checked(f"the drafter's folder ({profile.draft.path})", "give --draft FOLDER with a downloaded copy")
        return
    yield from _whole("drafter", draft)
    if draft.config is None:
        return
    yield from _context(profile, "drafter", draft.config)
    if not isinstance(profile.speculation, Dflash) or "speculators_model_type" in draft.config:
        # EAGLE-3 and the speculators layout keep these facts under names of their own.
        yield not_checked("whether the drafter fits its target: its layout is not DFlash's", "watch its acceptance")
    else:
        yield from _dflash(profile, profile.speculation, draft)
        if model is not None and model.config is not None:
            yield from _fits(draft.config, text_config(model.config))


def _whole(role: str, folder: FolderFacts) -> Iterator[Finding]:
    if folder.problem is not None:
        yield error(
            f"{role}-unreadable",
            f"the {role}'s folder: {folder.problem}",
            "download or export it again",
            "safetensors format",
        )
    if folder.missing_files:
        shown = ", ".join(folder.missing_files[:3])
        yield error(
            f"{role}-incomplete",
            f"the {role}'s index names {len(folder.missing_files)} weight files that are not there ({shown})",
            "resume the download",
            "interrupted download",
        )
    elif folder.config is not None and folder.problem is None and not folder.tensor_names:
        yield error(
            f"{role}-incomplete",
            f"the {role}'s folder holds no weights",
            "download or export it again",
            "safetensors format",
        )


def _context(profile: Profile, role: str, config: dict[str, Any]) -> Iterator[Finding]:
    longest = text_config(config).get("max_position_embeddings")
    if longest is None or profile.context_length <= longest:
        return
    if profile.environment.get(_LONGER) == "1" and isinstance(profile.engine, Sglang):
        return
    yield error(
        "context-too-long",
        f"a context of {profile.context_length} tokens is longer than the {role} was made for ({longest})",
        f"set context_length to {longest} or less"
        + (f" (or {_LONGER}=1, untested)" if isinstance(profile.engine, Sglang) else ""),
        "SGLang 0.5.23, model_config; vLLM 0.33.0",
    )


def _dflash(profile: Profile, spec: Dflash, draft: FolderFacts) -> Iterator[Finding]:
    config = draft.config or {}
    inner = config.get("dflash_config") or {}
    if draft.rewritten:
        yield error(
            "draft-config-rewritten",
            "an engine would read another drafter than was trained: transformers' config class changes"
            f" {'; '.join(draft.rewritten)}",
            "export the drafter again with use_sliding_window, layer_types and max_window_layers written out",
            "Qwen3Config nulls sliding_window; dflash drafters with sliding layers",
        )
    elif draft.rewritten is None:
        yield not_checked("whether the drafter's layer types survive transformers' config class", "give --draft FOLDER")
    kinds = tuple(config.get("layer_types") or ())
    if kinds and len(kinds) != config.get("num_hidden_layers"):
        yield error(
            "draft-layer-types",
            f"layer_types names {len(kinds)} layers, num_hidden_layers is {config.get('num_hidden_layers')}",
            "use the config.json of the export",
            "DFlash checkpoint layout",
        )
    if "sliding_attention" in kinds and not (config.get("sliding_window") and config.get("use_sliding_window")):
        yield error(
            "draft-sliding-window",
            "the drafter has sliding layers but no window: it would see everything, and acceptance falls",
            "write sliding_window and use_sliding_window: true, as they were trained",
            "vllm-project/vllm#40898",
        )
    if inner.get("target_layer_ids") is None and config.get("target_layer_ids") is None:
        yield error(
            "draft-taps-missing",
            "the drafter's config does not say which target layers it reads; guessed ones give acceptance near 1 %",
            "take dflash_config.target_layer_ids from the drafter's publisher",
            "vllm-project/vllm#40727",
        )
    rope = config.get("rope_parameters") or {}
    if config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) != 1.0 or "mrope_section" in rope:
        yield error(
            "draft-rope-inherited",
            "the drafter's config carries the target's partial or multi-axis rotation, but DFlash turns the whole"
            " head: acceptance near zero",
            "remove partial_rotary_factor and mrope_section from the drafter's config",
            _ROPE,
        )
    blocks = {value for value in (config.get("block_size"), inner.get("block_size")) if value is not None}
    if len(blocks) > 1:
        yield error(
            "draft-block-ambiguous",
            f"the drafter's config names two block sizes ({', '.join(map(str, sorted(blocks)))}): engines read"
            " different ones",
            "make the top level and dflash_config agree",
            "SGLang 0.5.23 and vLLM 0.33.0 readers",
        )
    elif spec.block_size is not None and blocks and spec.block_size not in blocks:
        yield error(
            "draft-block-differs",
            f"the profile drafts blocks of {spec.block_size}, the drafter was trained for {blocks.pop()}",
            "leave block_size out (SGLang) or set it to the drafter's",
            "DFlash checkpoint layout",
        )
    elif not blocks and spec.block_size is None:
        yield warning(
            "draft-block-unknown",
            "neither profile nor drafter say how long a block is, and SGLang takes 16",
            "set speculation.block_size",
            "SGLang 0.5.23, speculative_hook",
        )


def _fits(draft: dict[str, Any], target: dict[str, Any]) -> Iterator[Finding]:
    inner = draft.get("dflash_config") or {}

    def either(key: str) -> Any:
        return inner.get(key, draft.get(key))

    layers = target.get("num_hidden_layers")
    taps = either("target_layer_ids") or []
    if layers is not None and (outside := [tap for tap in taps if not 0 <= tap < layers]):
        yield error(
            "draft-taps-outside",
            f"the drafter reads outputs of layers {outside}, the target has 0 to {layers - 1}",
            "use the drafter of this target; ids count outputs from 0, engines add their own offset",
            "SGLang 0.5.17 on an H200: IndexError",
        )
    if len(set(taps)) != len(taps) or taps != sorted(taps):
        yield error(
            "draft-taps-order",
            f"target_layer_ids must rise and not repeat, not {taps}",
            "use the config.json of the export",
            "DFlash checkpoint layout",
        )
    equal = (
        ("draft-hidden-size", "hidden size", draft.get("hidden_size"), target.get("hidden_size")),
        ("draft-vocabulary", "vocabulary", draft.get("vocab_size"), target.get("vocab_size")),
        ("draft-target-layers", "number of target layers", draft.get("num_target_layers"), layers),
    )
    for id_, what, own, wanted in equal:
        if own is not None and wanted is not None and own != wanted:
            yield error(
                id_,
                f"the drafter's {what} is {own}, the target's is {wanted}",
                "use the drafter of this target",
                "DFlash shares embedding and lm_head with its target (arXiv 2602.06036)",
            )
    mask, vocabulary = either("mask_token_id"), target.get("vocab_size")
    if mask is None:
        yield error(
            "draft-mask-token",
            "the drafter's config names no mask_token_id, so its blocks are filled with something else",
            "take dflash_config.mask_token_id from the drafter's publisher",
            "DFlash checkpoint layout",
        )
    elif vocabulary is not None and not 0 <= mask < vocabulary:
        yield error(
            "draft-mask-token",
            f"the drafter's mask token {mask} is outside the target's vocabulary of {vocabulary}",
            "use the drafter of this target",
            "DFlash checkpoint layout",
        )
    elif mask in _ends(target):
        yield error(
            "draft-mask-token",
            f"the drafter's mask token {mask} ends a text: every block would stop",
            "use an unused id of the vocabulary, as it was trained",
            "DFlash checkpoint layout",
        )


def _ends(target: dict[str, Any]) -> tuple[int, ...]:
    ends = target.get("eos_token_id")
    return tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
