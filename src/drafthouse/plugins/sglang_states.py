"""A plug-in of SGLang (entry point group `sglang.srt.plugins`): a server that writes the hidden states of prompts.

SGLang's own ways do not serve: over HTTP it gives states as JSON, some 13 bytes a number, and its taps leave out the
last layer. Here the server writes tensors from its own process. For each request whose id is ours it leaves files
`<rid>.<first>.safetensors` in the folder DRAFTHOUSE_STATES, one a chunk of the prompt, `first` being the chunk's first
token: `hidden_states` `[T, K+1, H]`, the outputs of the layers DRAFTHOUSE_LAYERS (counted from 0) and, last, what goes
into the final norm; and `token_ids` `[T]`. A file has its name when it is whole. Without DRAFTHOUSE_STATES in the
environment nothing is changed.

Read of SGLang 0.5.17 and 0.5.23: the model's body notes the states that enter the layers in `layers_to_capture`, and
`forward_batch` has the ids, the lengths and the request ids of what is prefilled.
"""

from __future__ import annotations

import os
import queue
import re
import threading
import traceback
from pathlib import Path
from typing import Any

FOLDER, LAYERS = "DRAFTHOUSE_STATES", "DRAFTHOUSE_LAYERS"
OURS = re.compile(r"drafthouse-[0-9a-f]{32}")
WAITING = 8  # batches whose states lie in host memory until they are written; then the server waits


def ours(rid: str | None) -> bool:
    """Whether a request is of a worker of ours; a server's own trial runs have no id."""
    return rid is not None and OURS.fullmatch(rid) is not None


def register() -> None:
    """What SGLang calls once a process, before a model is loaded."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    from sglang.srt.model_executor.model_runner import ModelRunner

    layers = [int(layer) for layer in os.environ.get(LAYERS, "").split(",") if layer]
    before = ModelRunner.init_attention_backends

    # The last step before CUDA graphs are captured.
    def init_attention_backends(self: Any, *words: Any, **more: Any) -> Any:
        if not getattr(self, "is_draft_worker", False):
            check(self.server_args, layers)
            attach(self.model, layers, Writer(Path(folder)))
        return before(self, *words, **more)

    ModelRunner.init_attention_backends = init_attention_backends


def check(server_args: Any, layers: list[int]) -> None:
    """Raise RuntimeError, which ends the server, where states would be wrong or missing."""
    if not layers or layers != sorted(set(layers)) or layers[0] < 0:
        raise RuntimeError(f"{LAYERS} must be rising numbers of layers, as 1,16,31, not {os.environ.get(LAYERS)!r}")
    if not server_args.disable_radix_cache:
        raise RuntimeError("a prefix that is taken from the cache has no states: start with --disable-radix-cache")
    if getattr(server_args, "tp_size", 1) * getattr(server_args, "pp_size", 1) != 1:
        raise RuntimeError("states are whole on one GPU alone: start a server for each, with --tp 1")


def attach(model: Any, layers: list[int], writer: Writer) -> None:
    """Make `model` hand the states of prompts to `writer`; what it returns stays as it was."""
    body = next((module for module in model.modules() if hasattr(module, "layers_to_capture")), None)
    if body is None:
        raise RuntimeError(f"{type(model).__name__} captures no layers in this SGLang")
    count = len(body.layers)
    if layers[-1] >= count:
        raise RuntimeError(f"{LAYERS} names layer {layers[-1]}, and the model has {count}: they count from 0")
    # The body's numbers are of states that enter a layer. What the last one puts out enters the norm.
    body.set_dflash_layers_to_capture([layer + 1 for layer in layers if layer + 1 < count])
    last: list[Any] = []
    wanted = False

    def before_norm(_: Any, given: tuple[Any, ...]) -> None:
        if wanted:
            hidden, residual = (*given, None)[:2]
            last.append(hidden.clone() if residual is None else hidden + residual)

    body.norm.register_forward_pre_hook(before_norm)
    run = body.forward

    def forward(input_ids: Any, positions: Any, forward_batch: Any, *words: Any, **more: Any) -> Any:
        nonlocal wanted
        mode = forward_batch.forward_mode
        prefill = mode.is_extend() and not mode.is_target_verify()
        wanted = prefill and any(map(ours, forward_batch.rids or []))
        last.clear()
        found = run(input_ids, positions, forward_batch, *words, **more)
        hidden, taps = found if isinstance(found, tuple) else (found, [])
        if wanted:
            tapped = [*taps, *last] if layers[-1] < count - 1 else [*taps, *last, *last]
            writer.take(forward_batch, tapped)
        wanted = False
        return hidden

    body.forward = forward


class Writer:
    """Copies states off the device and writes them, a file a request, while the server goes on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._waiting: queue.Queue[tuple[Any, ...]] = queue.Queue(WAITING)
        threading.Thread(target=self._write, name="states", daemon=True).start()

    def take(self, batch: Any, tapped: list[Any]) -> None:
        """States of a batch, tensors `[tokens, H]` side by side; returns when the copy to the host is under way."""
        import torch

        lengths = list(batch.extend_seq_lens_cpu)
        states = torch.stack([one[: sum(lengths)] for one in tapped], dim=1)
        on_device = states.is_cuda
        host = torch.empty(states.shape, dtype=states.dtype, pin_memory=on_device)
        host.copy_(states, non_blocking=True)
        ids = torch.empty(sum(lengths), dtype=torch.int64, pin_memory=on_device)
        ids.copy_(batch.input_ids[: len(ids)], non_blocking=True)
        copied: Any = torch.cuda.Event() if on_device else None  # type: ignore[no-untyped-call]
        if copied is not None:
            copied.record()
        self._waiting.put((list(batch.rids), list(batch.extend_prefix_lens_cpu), lengths, ids, host, copied))

    def _write(self) -> None:
        from safetensors.torch import save_file

        while True:
            rids, firsts, lengths, ids, states, copied = self._waiting.get()
            try:
                if copied is not None:
                    copied.synchronize()
                place = 0
                for rid, first, length in zip(rids, firsts, lengths, strict=True):
                    rows = slice(place, place + length)
                    place += length
                    if ours(rid):
                        path = self._folder / f"{rid}.{first}.safetensors"
                        unfinished = path.with_suffix(".part")
                        save_file(
                            {"hidden_states": states[rows].contiguous(), "token_ids": ids[rows].clone()}, unfinished
                        )
                        unfinished.rename(path)
            except Exception:  # a full disk must not end the server: who waits for the file is told by its absence
                traceback.print_exc()
