"""A test double of an SGLang server that runs our plug-in, over a real target.

The plug-in is loaded by its declared entry point into a stand-in of SGLang's `ModelRunner`, whose model has the parts
that SGLang 0.5.17 and 0.5.23 have: a body that notes states entering its layers and returns them beside the normed
ones, and a norm that adds what a layer left of its residual. Every batch holds a request of somebody else, too.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from drafthouse.target import Target
from tests.doubles.loopback import JsonHandler, serving

MODULE = "sglang.srt.model_executor.model_runner"


class Mode:
    """SGLang's ForwardMode: verification of drafts counts as extending there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def is_extend(self) -> bool:
        return self._name in {"extend", "verify"}

    def is_target_verify(self) -> bool:
        return self._name == "verify"


class Norm(nn.Module):
    def forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        whole = hidden + residual
        return nn.functional.rms_norm(whole, whole.shape[-1:]), whole


class Body(nn.Module):
    """Layers that pass on what `forward_batch.entering` `[tokens, L+1, H]` says; the last of it enters the norm."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(layers))
        self.norm = Norm()
        self.layers_to_capture: list[int] = []

    def set_dflash_layers_to_capture(self, layers: list[int]) -> None:
        self.layers_to_capture = layers
        for layer in layers:
            self.layers[layer]._is_layer_to_capture = True

    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any) -> Any:
        taps = []
        for number, layer in enumerate(self.layers):
            if getattr(layer, "_is_layer_to_capture", False):
                taps.append(forward_batch.entering[:, number].clone())
        last = forward_batch.entering[:, -1]
        hidden, _ = self.norm(torch.zeros_like(last), last)
        return (hidden, taps) if taps else hidden


class Model(nn.Module):
    """The class around the body; it was not told that anything is captured."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.model = Body(layers)

    def forward(self, batch: Any) -> Tensor:
        hidden = self.model(batch.input_ids, batch.positions, batch)
        assert isinstance(hidden, Tensor)
        return hidden


def engine() -> type[Any]:
    """SGLang's module with a fresh `ModelRunner`, put where an import finds it."""

    class ModelRunner:
        def __init__(self, model: Model, **server_args: Any) -> None:
            self.model = model
            self.server_args = SimpleNamespace(
                **{"disable_radix_cache": True, "tp_size": 1, "pp_size": 1} | server_args
            )
            self.ready = False

        def init_attention_backends(self) -> None:
            self.ready = True

    module = ModuleType(MODULE)
    module.ModelRunner = ModelRunner  # type: ignore[attr-defined]
    sys.modules[MODULE] = module
    return ModelRunner


def load_plugins() -> None:
    """As SGLang does: every declared plug-in of the group is called."""
    for plugin in entry_points(group="sglang.srt.plugins"):
        plugin.load()()


@dataclass
class Behaviour:
    """The server's model, and how it takes prompts.

    Attributes:
        runner: after `init_attention_backends`.
        chunk: tokens of a prompt that are prefilled at once, at most.
        broken: "" or "zeros" (states of a hybrid that the engine got wrong).
    """

    target: Target
    runner: Any
    chunk: int = 10**6
    broken: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def prefill(self, rid: str, ids: list[int]) -> None:
        """One prompt in its chunks, each in a batch with tokens of others around it; then a step of decoding."""
        tokens = torch.tensor([ids])
        layers = list(range(self.target.num_layers))
        outputs = self.target.capture(tokens, torch.tensor([len(ids)]), layers)[0].bfloat16()
        entering = torch.cat([torch.zeros_like(outputs[:, :1]), outputs[:, :-1]], dim=1)
        if self.broken == "zeros":
            entering = torch.zeros_like(entering)
        for first in range(0, len(ids), self.chunk):
            part = slice(first, min(first + self.chunk, len(ids)))
            other = torch.full_like(entering[:2], 7.0)
            self._run(
                "extend",
                ["somebody", rid, None],
                torch.cat([torch.tensor([1, 2]), tokens[0, part], torch.tensor([3, 4])]),
                torch.cat([other, entering[part], other]),
                [0, first, 0],
                [2, part.stop - first, 2],
            )
        for mode in ("decode", "verify"):
            self._run(mode, [rid], tokens[0, -1:], entering[-1:], [len(ids)], [1])

    def _run(
        self, mode: str, rids: list[str | None], ids: Tensor, entering: Tensor, firsts: list[int], lengths: list[int]
    ) -> None:
        batch = SimpleNamespace(
            forward_mode=Mode(mode),
            rids=rids,
            input_ids=ids,
            positions=torch.arange(len(ids)),
            entering=entering,
            extend_prefix_lens_cpu=firsts,
            extend_seq_lens_cpu=lengths,
        )
        self.runner.model(batch)


class Handler(JsonHandler):
    def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
        behaviour: Behaviour = self.server.double  # type: ignore[attr-defined]
        asked = self.asked()
        assert self.path == "/generate"
        assert asked["sampling_params"]["max_new_tokens"] == 1
        with behaviour.lock:
            behaviour.prefill(asked["rid"], asked["input_ids"])
        self.answer(200, {"output_ids": [1], "meta_info": {"id": asked["rid"]}})


@contextmanager
def sglang_server(behaviour: Behaviour) -> Iterator[str]:
    """Serve until the block ends; yields the address."""
    with serving(Handler, behaviour) as url:
        yield url
