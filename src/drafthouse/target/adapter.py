"""One face for every target: Qwen3.5/3.6-class Gated-DeltaNet hybrids (text-only or wrapped) and dense Qwen3.

A layer id has one meaning in this house: id i is the OUTPUT of decoder layer i, counted from 0. Transformers'
`output_hidden_states` shifts that by one, replaces the last layer's output by the normed one, and its list
form changed meaning between releases; so the taps are forward hooks on the decoder layers themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn

from drafthouse.config import digest_of
from drafthouse.errors import TargetError
from drafthouse.target import recurrence

# Architecture in config.json -> path from the model to the text decoder that owns `layers` and `norm`.
DECODER_PATH = {
    "Qwen3_5ForCausalLM": "model",
    "Qwen3_5ForConditionalGeneration": "model.language_model",
    "Qwen3ForCausalLM": "model",
}
# Vocabulary size -> mask token id of the published DFlash drafters (z-lab, Qwen3.5/3.6-27B-DFlash).
PUBLISHED_MASK_ID = {248_320: 248_070}
# A weight file up to this size is hashed whole; of a larger one the header and evenly spaced blocks are.
WHOLE_HASH_BYTES = 256 << 20
SAMPLED_BLOCKS = 64
BLOCK_BYTES = 64 << 10


class Target:
    """A frozen causal language model together with its tokenizer.

    Args:
        model: one of the architectures of `DECODER_PATH`; put into eval mode, gradients off.
        tokenizer: the tokenizer that came with it; None where only tensors are needed.
        identity: what `identity_of` says of its files; drafters and state shards carry it.
    """

    def __init__(self, model: nn.Module, tokenizer: Any = None, *, identity: str = "") -> None:
        architecture = type(model).__name__
        if architecture not in DECODER_PATH:
            raise TargetError(
                f"architecture {architecture} is not supported",
                fix=f"use one of {', '.join(DECODER_PATH)}",
            )
        recurrence.install()
        self.model = model.eval().requires_grad_(False)
        self.decoder = model.get_submodule(DECODER_PATH[architecture])
        self.layers = cast(nn.ModuleList, self.decoder.layers)
        self.tokenizer = tokenizer
        self.identity = identity
        whole = cast(Any, model).config
        self.config = getattr(whole, "text_config", whole)

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        weights: bool = True,
    ) -> Target:
        """Load a model folder (config.json, safetensors, tokenizer files).

        Args:
            weights: False for a target that somebody else computes: it has a shape, an identity and a tokenizer, on
                the meta device.

        Raises:
            TargetError: the folder is missing, incomplete, damaged, or of an unknown architecture.
        """
        folder = Path(path)
        where = str(folder)
        check_device(device)
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            architecture = config["architectures"][0]
        except (FileNotFoundError, NotADirectoryError):
            raise TargetError("no config.json here", where=where, fix="give a model folder") from None
        except (json.JSONDecodeError, KeyError, IndexError, TypeError, UnicodeDecodeError):
            raise TargetError("config.json names no architecture", where=where, fix="fetch it again") from None
        if architecture not in DECODER_PATH:
            known = ", ".join(DECODER_PATH)
            raise TargetError(f"architecture {architecture} is not supported", where=where, fix=f"use {known}")
        try:
            if weights:
                model, report = getattr(transformers, architecture).from_pretrained(
                    folder, dtype=dtype, output_loading_info=True
                )
            else:
                with torch.device("meta"):
                    model = getattr(transformers, architecture)(transformers.AutoConfig.from_pretrained(folder))
                report, device = {"missing_keys": []}, "meta"
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise TargetError(f"cannot be loaded ({reason})", where=where, fix="fetch the files again") from error
        if report["missing_keys"]:
            missing = sorted(report["missing_keys"])
            raise TargetError(
                f"{len(missing)} weight tensors are missing, first {missing[0]}",
                where=where,
                fix="fetch the weights again",
            )
        # Without its files transformers makes a tokenizer that knows its special tokens and nothing else.
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise TargetError("no tokenizer files here", where=where, fix="fetch tokenizer.json")
        return cls(model.to(device), tokenizer, identity=identity_of(folder))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def layer_types(self) -> list[str]:
        """`linear_attention` or `full_attention` for each decoder layer."""
        kinds = getattr(self.config, "layer_types", None)
        return list(kinds) if kinds else ["full_attention"] * self.num_layers

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end a turn, from the tokenizer and the config together."""
        ids: list[int] = []
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            ids.append(int(self.tokenizer.eos_token_id))
        configured = getattr(self.config, "eos_token_id", None)
        ids += [configured] if isinstance(configured, int) else list(configured or [])
        return tuple(dict.fromkeys(ids))

    @property
    def mask_token_id(self) -> int:
        """The token that fills the unknown slots of a draft block: the tokenizer's mask token, or for the
        Qwen3.5/3.6 vocabulary the unused id that published drafters use.

        Raises:
            TargetError: the tokenizer has none.
        """
        mask = getattr(self.tokenizer, "mask_token_id", None)
        if mask is None:
            mask = PUBLISHED_MASK_ID.get(self.vocab_size)
        if mask is None:
            raise TargetError("the tokenizer has no mask token", where="tokenizer", fix="add an unused one")
        return int(mask)

    def check_layer_ids(self, layer_ids: Sequence[int]) -> None:
        """Raise TargetError unless every id names a decoder layer of this target, in strictly rising order."""
        bad = [i for i in layer_ids if not 0 <= i < self.num_layers]
        if bad:
            raise TargetError(
                f"layer id {bad[0]} is out of range: this target has decoder layers 0 to {self.num_layers - 1}",
                where="layer_ids",
                fix="an id is the output of that decoder layer, counted from 0",
            )
        if list(layer_ids) != sorted(set(layer_ids)):
            raise TargetError(
                f"layer ids {list(layer_ids)} do not rise strictly",
                where="layer_ids",
                fix="sort them, each once",
            )

    @torch.no_grad()
    def capture(
        self, input_ids: Tensor, lengths: Tensor, layer_ids: Sequence[int], *, out: Tensor | None = None
    ) -> Tensor:
        """Run the decoder and keep the outputs of some layers and, last, of the final one before its norm.

        Rows are padded on the right, which a causal model never looks at: no attention mask is needed, and
        what the padding holds does not change the states of valid positions (in tests, by exactly 0.0).

        Args:
            input_ids: token ids `[rows, seq]`, int64, right-padded.
            lengths: valid tokens of each row `[rows]`; not used to compute, callers use it to pack.
            layer_ids: decoder layers to tap, strictly rising.
            out: buffer `[rows, seq, len(layer_ids) + 1, hidden]` to fill instead of a new one.

        Returns:
            `[rows, seq, len(layer_ids) + 1, hidden]` in the target's dtype.

        Raises:
            TargetError: a layer id is out of range, or the ids do not rise.
            ValueError: `out` has another shape; copying would broadcast, or leave a slot unfilled.
        """
        self.check_layer_ids(layer_ids)
        rows, seq = input_ids.shape
        shape = (rows, seq, len(layer_ids) + 1, self.hidden_size)
        if out is None:
            out = torch.empty(shape, dtype=self.dtype, device=self.device)
        elif out.shape != shape:
            raise ValueError(f"the buffer is {list(out.shape)} but the capture fills {list(shape)}")
        slots = {layer: slot for slot, layer in enumerate(layer_ids)}
        last = self.num_layers - 1
        with self._hooks(slots, last, out):
            self.decoder(input_ids=input_ids.to(self.device), use_cache=False)
        return out

    @contextmanager
    def _hooks(self, slots: dict[int, int], last: int, out: Tensor) -> Iterator[None]:
        def keep(module: nn.Module, args: Any, output: Any, *, places: list[int]) -> None:
            hidden = output if isinstance(output, Tensor) else output[0]
            for place in places:
                out[:, :, place].copy_(hidden)

        handles = []
        try:
            for layer in sorted({*slots, last}):
                places = [slots[layer]] if layer in slots else []
                places += [out.shape[2] - 1] if layer == last else []
                handles.append(self.layers[layer].register_forward_hook(partial(keep, places=places)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def final_norm(self, hidden: Tensor) -> Tensor:
        """The final norm, for pre-norm states `[..., hidden]`; for Qwen3.5 it scales by (1 + weight)."""
        return cast(Tensor, cast(nn.Module, self.decoder.norm)(hidden))

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits `[..., vocab]` of normed states `[..., hidden]`."""
        return cast(Tensor, cast(nn.Module, self.model.lm_head)(hidden))

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings `[..., hidden]` of token ids `[...]`."""
        return cast(Tensor, cast(nn.Module, self.decoder.embed_tokens)(ids))


def check_device(device: str | torch.device) -> None:
    """Raise TargetError unless tensors can be made on `device`: it exists, and this torch was built for it."""
    where, fix = "target.device", "use cpu, or cuda where there is a GPU"
    try:
        torch.device(device)
    except RuntimeError as error:
        raise TargetError(f"'{device}' is no device", where=where, fix=fix) from error
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
        reason = str(error).partition("\n")[0][:100]
        raise TargetError(f"the device '{device}' cannot be used ({reason})", where=where, fix=fix) from error


def identity_of(folder: Path) -> str:
    """sha256 (hex) that names a target: its architecture settings and its weights.

    Small weight files are hashed whole. Of files above `WHOLE_HASH_BYTES` the size, the safetensors header and
    `SAMPLED_BLOCKS` evenly spaced blocks go in, so that naming a 55 GB model takes no minutes.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("transformers_version", None)
    weights = {file.name: _file_digest(file) for file in sorted(folder.glob("*.safetensors"))}
    if not weights:
        raise TargetError("no safetensors weights here", where=str(folder), fix="fetch the weights")
    return digest_of({"config": config, "weights": weights})


def _file_digest(file: Path) -> str:
    digest = hashlib.sha256()
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= WHOLE_HASH_BYTES:
            while block := stream.read(1 << 20):
                digest.update(block)
        else:
            digest.update(size.to_bytes(8, "little"))
            header = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(min(header, WHOLE_HASH_BYTES)))
            for block_index in range(SAMPLED_BLOCKS):
                stream.seek((size - BLOCK_BYTES) * block_index // (SAMPLED_BLOCKS - 1))
                digest.update(stream.read(BLOCK_BYTES))
    return digest.hexdigest()
