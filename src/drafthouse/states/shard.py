"""A shard of hidden states: one safetensors file whose layout is known before its states are.

    hidden_states      bf16 [T, K, H]   outputs of the decoder layers `layer_ids`
    last_hidden_state  bf16 [T, H]      output of the last decoder layer, before the final norm
    input_ids          i32  [T]         tokens of all samples, one after the other
    loss_mask          u8   [T]         1 where the model must answer
    offsets            i64  [n+1]       sample i is the tokens offsets[i]:offsets[i+1]
    kind               u8   [n]         index into the metadata's `kinds`

With fp8 both kinds of states are e4m3, and `hidden_scales` f32 [T, K] and `last_scales` f32 [T] stand beside them.

`ShardFile` writes states straight to their place, in any order, so that memory never holds a shard. Readers
map the file (format: https://github.com/huggingface/safetensors, README, "Format").
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafthouse.errors import StatesError
from drafthouse.states.elements import decoded, elements
from drafthouse.states.protocols import TokenizedSample
from drafthouse.states.spec import SCHEMA, StatesSpec
from drafthouse.store.files import write_at
from drafthouse.store.translate import explain

_NOT_SUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}  # file systems without fallocate
_HASH_BLOCK = 4 * 2**20
_MOST_KINDS = 256  # a kind is one byte


@dataclass(frozen=True)
class ShardSample:
    """A sample as it goes into a shard: cut to the run's `max_tokens`."""

    id: str
    kind: str
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]


def cut(samples: Sequence[TokenizedSample], max_tokens: int, where: str) -> list[ShardSample]:
    """The samples with their first `max_tokens` tokens.

    Raises:
        StatesError: a shard without samples, a sample without tokens, or a mask of another length.
    """
    if not samples:
        raise StatesError("the corpus shard holds no sample", where=where, fix="build the corpus again")
    made = []
    for sample in samples:
        ids, mask = np.asarray(sample.input_ids), np.asarray(sample.loss_mask)
        if ids.ndim != 1 or not ids.size or ids.shape != mask.shape:
            raise StatesError(
                f"sample '{sample.id}' has {ids.shape} tokens and a mask of {mask.shape}",
                where=where,
                fix="build the corpus again",
            )
        made.append(
            ShardSample(
                sample.id,
                sample.kind,
                ids[:max_tokens].astype(np.int32, copy=False),
                mask[:max_tokens].astype(np.uint8, copy=False),
            )
        )
    return made


class ShardFile:
    """A shard that is being written to a local file. States arrive by `write`, the rest is there from the
    start.

    The file is complete when all tokens were written: `finish` checks that, and hashes it.

    Args:
        path: a new file.
        spec: of the run.
        samples: all samples of the shard, in the corpus's order.

    Raises:
        StoreError: the disk is full.
    """

    def __init__(self, path: Path, spec: StatesSpec, samples: Sequence[ShardSample]) -> None:
        self.path = path
        self.spec = spec
        lengths = [len(sample.input_ids) for sample in samples]
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.tokens = int(self.offsets[-1])
        kinds = sorted({sample.kind for sample in samples})
        if len(kinds) > _MOST_KINDS:
            raise StatesError(f"more than {_MOST_KINDS} kinds", where=str(path), fix="merge some kinds")
        small = {
            "input_ids": np.concatenate([sample.input_ids for sample in samples]),
            "loss_mask": np.concatenate([sample.loss_mask for sample in samples]),
            "offsets": self.offsets,
            "kind": np.array([kinds.index(sample.kind) for sample in samples], dtype=np.uint8),
        }
        self._elements = elements(spec)
        metadata = {
            "schema": str(SCHEMA),
            "spec_sha256": spec.digest(),
            "layer_ids": json.dumps(list(spec.layer_ids)),
            "dtype": spec.dtype,
            "kinds": json.dumps(kinds),
            "ids": json.dumps([sample.id for sample in samples]),
        }
        header, self._begins, self.size = self._layout(small, metadata)
        self._left = self.tokens
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except OSError as error:
            raise explain(error, str(path)) from error
        try:
            # Reserving the space tells now, and not after minutes of work, that the disk is too small.
            _reserve(self._descriptor, self.size)
            write_at(self._descriptor, memoryview(header), 0)
            for name, array in small.items():
                write_at(self._descriptor, array.data.cast("B"), self._begins[name])
        except OSError as error:
            self.abort()
            raise explain(error, str(path)) from error

    def write(self, parts: Sequence[Tensor], samples: Sequence[int]) -> None:
        """Put the states of whole samples in their places.

        Args:
            parts: on the CPU, contiguous, as `elements` has them: `[N, K, H]`, `[N, H]` …, the tokens of `samples`, one
                after the other.
            samples: indices of the samples in the shard.

        Raises:
            StoreError: the disk is full.
        """
        data = [_bytes_of(part) for part in parts]
        row = 0
        try:
            for sample in samples:
                first, end = int(self.offsets[sample]), int(self.offsets[sample + 1])
                stop = row + end - first
                for element, held in zip(self._elements, data, strict=True):
                    width = element.token_bytes
                    at = self._begins[element.name] + first * width
                    write_at(self._descriptor, held[row * width : stop * width], at)
                row = stop
        except OSError as error:
            raise explain(error, str(self.path)) from error
        if row != parts[0].shape[0]:
            raise StatesError(f"{parts[0].shape[0]} states for {row} tokens", where=str(self.path))
        self._left -= row

    def finish(self) -> str:
        """Close the complete file and return its sha256 (hex).

        Raises:
            StatesError: some tokens never got their states.
            StoreError: the file cannot be written.
        """
        if self._left:
            raise StatesError(f"{self._left} of {self.tokens} tokens have no states", where=str(self.path))
        try:
            os.close(self._descriptor)  # the upload reads it through the page cache: no fsync is needed
        except OSError as error:
            raise explain(error, str(self.path)) from error
        finally:
            self._descriptor = -1
        return sha256_of(self.path)

    def abort(self) -> None:
        """Close and remove the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self.path.unlink(missing_ok=True)

    def _layout(
        self, small: dict[str, npt.NDArray[np.generic]], metadata: dict[str, str]
    ) -> tuple[bytes, dict[str, int], int]:
        """Header bytes, where in the file each tensor begins, and the size of the file."""
        # Widest elements first, so that every tensor begins at a multiple of its element's size.
        shapes: list[tuple[str, str, list[int], int]] = [
            ("offsets", "I64", list(small["offsets"].shape), small["offsets"].nbytes),
            ("input_ids", "I32", [self.tokens], small["input_ids"].nbytes),
            *(
                (one.name, one.code, [self.tokens, *one.shape], self.tokens * one.token_bytes)
                for one in sorted(self._elements, key=lambda element: -element.dtype.itemsize)
            ),
            ("loss_mask", "U8", [self.tokens], small["loss_mask"].nbytes),
            ("kind", "U8", list(small["kind"].shape), small["kind"].nbytes),
        ]
        entries: dict[str, object] = {"__metadata__": metadata}
        begin = 0
        begins = {}
        for name, dtype, shape, size in shapes:
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size]}
            begins[name] = begin
            begin += size
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        head = len(text).to_bytes(8, "little") + text
        return head, {name: len(head) + at for name, at in begins.items()}, len(head) + begin


class OpenShard:
    """A finished shard, mapped into memory: its tensors are views of the file and cost no memory until read.

    Raises:
        StatesError: not a shard, cut off, or of another spec.
    """

    def __init__(self, path: Path, spec: StatesSpec, where: str) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                metadata: dict[str, str] = file.metadata() or {}
                _check_metadata(metadata, spec, where)
                self._parts: list[Tensor] = [file.get_tensor(element.name) for element in elements(spec)]
                self.input_ids: Tensor = file.get_tensor("input_ids")
                self.loss_mask: Tensor = file.get_tensor("loss_mask")
                self.offsets: list[int] = file.get_tensor("offsets").tolist()
                kinds: list[int] = file.get_tensor("kind").tolist()
        except (SafetensorError, OSError) as error:
            reason = " ".join(str(error).split())[:120]
            raise StatesError(
                f"the shard is damaged or cut off ({reason})", where=where, fix="extract the shard again"
            ) from error
        names = json.loads(metadata["kinds"])
        self.ids: list[str] = json.loads(metadata["ids"])
        self.kinds: list[str] = [names[kind] for kind in kinds]
        self._check(spec, where)

    def __len__(self) -> int:
        return len(self.ids)

    def states(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """`hidden_states` `[N, K, H]` and `last_hidden_state` `[N, H]` of the tokens begin:end, bf16; of a bf16 shard
        views of the file."""
        return decoded([part[begin:end] for part in self._parts])

    def load(self) -> None:
        """Copy all tensors into memory, so that reading no longer touches the disk."""
        self._parts = [part.clone() for part in self._parts]
        self.input_ids, self.loss_mask = self.input_ids.clone(), self.loss_mask.clone()

    def _check(self, spec: StatesSpec, where: str) -> None:
        tokens = self.input_ids.shape[0]
        found = {element.name: tuple(part.shape) for element, part in zip(elements(spec), self._parts, strict=True)}
        expected = {element.name: (tokens, *element.shape) for element in elements(spec)}
        for name, shape in (expected | {"loss_mask": (tokens,)}).items():
            there = found.get(name, tuple(self.loss_mask.shape))
            if there != shape:
                raise StatesError(f"{name} is {list(there)} instead of {list(shape)}", where=where)
        if len(self.offsets) != len(self.ids) + 1 or self.offsets[-1] != tokens:
            raise StatesError("offsets, ids and tokens do not fit together", where=where)


def sha256_of(path: Path) -> str:
    """sha256 (hex) of a file, in blocks; releases the interpreter while it hashes."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _check_metadata(metadata: dict[str, str], spec: StatesSpec, where: str) -> None:
    if metadata.get("schema") != str(SCHEMA):
        raise StatesError(f"not a states shard of schema {SCHEMA}", where=where, fix="extract the shard again")
    if metadata.get("spec_sha256") != spec.digest():
        raise StatesError(
            f"the shard belongs to another specification: {metadata.get('spec_sha256')} instead of {spec.digest()}",
            where=where,
            fix="see who else writes into this run",
        )


def _bytes_of(states: Tensor) -> memoryview:
    return states.reshape(-1).view(torch.uint8).numpy().data


def _reserve(descriptor: int, size: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        os.ftruncate(descriptor, size)
