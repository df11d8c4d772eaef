from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from tests.unit.target.tiny_models import hybrid


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, `<end>` (id 1) ends a turn, no mask token."""
    vocab = {"<pad>": 0, "<end>": 1} | {f"w{i}": i for i in range(2, 97)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


@pytest.fixture
def model_folder(tmp_path: Path, word_tokenizer: PreTrainedTokenizerFast) -> Callable[..., Path]:
    """Write a model as a folder that `Target.load` reads."""

    def write(model: nn.Module | None = None, name: str = "model", tokenizer: Any = word_tokenizer) -> Path:
        folder = tmp_path / name
        whole: Any = hybrid() if model is None else model
        whole.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return write
