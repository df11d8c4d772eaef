"""A plug-in of SGLang 0.5.17 (entry point group `sglang.srt.plugins`), loaded in every process of a server.

TAPS=1,3,5 captures the outputs of these layers without a drafter: with --enable-return-hidden-states an answer then
carries them, side by side for each token, instead of the last hidden state. TAPTEXT=1 gives the text-only class the
hook for DFLASH that it lacks in this release. An id is the output of that layer, counted from 0: the wrapper class adds
the one that SGLang counts from itself, the text-only class is given it here.
"""

from __future__ import annotations

import os
from typing import Any


def register() -> None:
    """What SGLang calls once a process, before a model is loaded."""
    if os.environ.get("TAPTEXT"):
        from sglang.srt.models.qwen3_5_text import Qwen3_5ForCausalLM

        def set_dflash_layers_to_capture(self: Any, layer_ids: list[int]) -> None:
            self.capture_aux_hidden_states = True
            self.model.set_dflash_layers_to_capture([layer + 1 for layer in layer_ids])

        Qwen3_5ForCausalLM.set_dflash_layers_to_capture = set_dflash_layers_to_capture
    taps = [int(layer) for layer in os.environ.get("TAPS", "").split(",") if layer]
    if not taps:
        return
    from sglang.srt.model_executor.model_runner import ModelRunner

    before = ModelRunner.init_attention_backends

    def init_attention_backends(self: Any, *words: Any, **more: Any) -> Any:
        if not getattr(self, "is_draft_worker", False):
            self.model.set_dflash_layers_to_capture(taps)
        return before(self, *words, **more)

    ModelRunner.init_attention_backends = init_attention_backends
