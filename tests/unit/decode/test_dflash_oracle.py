"""Chain decoding against transformers' own DFlash generation, with the same weights in its drafter.

`MuseGlimmerAssistantModel` with full attention is our architecture under other names: `encoder.fc` and
`encoder.output_norm_enc` for `fc` and `hidden_norm`, all else equal. So not only the text but the number of
target passes must agree.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers

from drafthouse.decode import decode
from drafthouse.drafter.model import DFlashDrafter
from tests.unit.decode.pairs import NEW_TOKENS, Pair, drafter_config

RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


def assistant_of(drafter: DFlashDrafter) -> torch.nn.Module:
    """Our drafter as transformers' class, strictly loaded: no weight may be left over on either side."""
    config = drafter.config
    same = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"]
    same += ["num_key_value_heads", "rms_norm_eps", "block_size", "mask_token_id"]
    model = transformers.MuseGlimmerAssistantModel(
        transformers.MuseGlimmerAssistantConfig(
            **{name: getattr(config, name) for name in same},
            layer_types=["full_attention"] * config.num_hidden_layers,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            target_layer_ids=list(config.target_layer_ids),
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    )
    weights = {RENAMED.get(name, name): value for name, value in drafter.state_dict().items()}
    model.load_state_dict(weights, strict=True)
    return cast(torch.nn.Module, model.eval())


def generate(
    pair: Pair, assistant: torch.nn.Module, prompt: np.ndarray, eos: list[int] | None
) -> tuple[list[int], int]:
    """Text and target passes after prefill of transformers' DFlash decoding."""
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    hook = pair.target.decoder.register_forward_hook(count)
    try:
        whole = cast(Any, pair.target.model).generate(
            torch.from_numpy(prompt.astype(np.int64))[None],
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            assistant_model=assistant,
            speculation_type="dflash",
            eos_token_id=eos,
            pad_token_id=0,
        )
    finally:
        hook.remove()
    return whole[0, len(prompt) :].tolist(), passes - 1


def test_text_and_passes_are_those_of_transformers(dense_pair: Pair) -> None:
    ours = decode(dense_pair.stepper, dense_pair.drafter, dense_pair.prompts, dense_pair.settings("chain"))
    assistant = assistant_of(dense_pair.drafter)
    passes = []
    for generation, prompt, reference in zip(ours, dense_pair.prompts, dense_pair.references, strict=True):
        text, needed = generate(dense_pair, assistant, prompt, None)
        assert generation.tokens == text == reference
        assert generation.target_passes == needed
        passes.append(needed)
    assert len(set(passes)) >= 4  # good drafts and bad ones


def test_they_end_at_the_same_token(dense_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [dense_pair.references[0][12], dense_pair.references[1][7]]
    monkeypatch.setattr(dense_pair.target.config, "eos_token_id", ends)
    prompts = dense_pair.prompts[:4]
    ours = decode(dense_pair.stepper, dense_pair.drafter, prompts, dense_pair.settings("chain"))
    assistant = assistant_of(dense_pair.drafter)
    assert min(len(generation.tokens) for generation in ours) < NEW_TOKENS
    for generation, prompt in zip(ours, prompts, strict=True):
        assert generate(dense_pair, assistant, prompt, ends) == (
            generation.tokens,
            generation.target_passes,
        )


def test_another_drafter_gives_the_same_text_with_other_passes(dense_pair: Pair) -> None:
    stranger = DFlashDrafter(drafter_config(dense_pair.target)).eval()
    prompts = dense_pair.prompts[:3]
    ours = decode(dense_pair.stepper, stranger, prompts, dense_pair.settings("chain"))
    theirs = [generate(dense_pair, assistant_of(stranger), prompt, None) for prompt in prompts]
    assert [(g.tokens, g.target_passes) for g in ours] == theirs
    assert [g.tokens for g in ours] == dense_pair.references[:3]
    fitted = decode(dense_pair.stepper, dense_pair.drafter, prompts, dense_pair.settings("chain"))
    assert sum(g.target_passes for g in fitted) < sum(g.target_passes for g in ours)
