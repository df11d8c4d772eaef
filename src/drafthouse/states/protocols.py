"""What the extraction needs of a target and of a corpus; `drafthouse.target` and `drafthouse.corpus` have
them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Described(Protocol):
    """What a target is, without its weights."""

    @property
    def identity(self) -> str: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...


class Taps(Described, Protocol):
    """A target whose layer outputs can be captured; `drafthouse.target.Target` and `ServedTaps` are such."""

    @property
    def device(self) -> torch.device: ...

    def capture(
        self, input_ids: Tensor, lengths: Tensor, layer_ids: Sequence[int], *, out: Tensor | None = None
    ) -> Tensor:
        """Outputs of `layer_ids` and, last, of the final layer before its norm: `[rows, seq, K+1, hidden]`.

        `input_ids` int64 `[rows, seq]` are right-padded; `lengths` is `[rows]`. The states are written into
        `out`, whose dtype may differ from the model's, when it is given.
        """
        ...


class TokenizedSample(Protocol):
    """A tokenised conversation: `input_ids` int32 `[T]`, `loss_mask` uint8 `[T]`."""

    @property
    def id(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def input_ids(self) -> npt.NDArray[np.int32]: ...
    @property
    def loss_mask(self) -> npt.NDArray[np.uint8]: ...


class CorpusManifest(Protocol):
    """The identity of a corpus, and how many tokens it holds."""

    @property
    def digest(self) -> str: ...
    @property
    def tokens(self) -> int: ...


class Corpus(Protocol):
    """A corpus in shards; `drafthouse.corpus.CorpusReader` is one."""

    @property
    def manifest(self) -> CorpusManifest: ...
    @property
    def shard_names(self) -> Sequence[str]: ...

    def shard(self, name: str) -> Sequence[TokenizedSample]: ...
