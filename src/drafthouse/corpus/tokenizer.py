"""A byte-level BPE tokenizer trained from the corpus itself, for targets too small for a large vocabulary.

Byte-level BPE: Sennrich et al. 2016 (arXiv:1508.07909) over bytes as in GPT-2. The pre-tokeniser's pattern is
the one of the Qwen family: digits stand alone and a line break may close a run of punctuation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from drafthouse.errors import CorpusError

PAD, TURN_START, TURN_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
CONTROL_TOKENS = (PAD, TURN_START, TURN_END, MASK)
# Not "special" in the sense of decode(skip_special_tokens=True): an answer's structure has to survive
# decoding.
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SMALLEST = len(CONTROL_TOKENS) + len(MARKUP_TOKENS) + 256


def default_chat_template() -> str:
    """The Jinja chat template that ships with this package."""
    return resources.files(__package__).joinpath("chat_template.jinja").read_text(encoding="utf-8")


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, *, chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of exactly `vocab_size` entries; equal texts give an equal one.

    Ids 0 to 3 are `<|endoftext|>` (padding), `<|im_start|>`, `<|im_end|>` (end of turn) and `<|mask|>`; the
    markup tokens follow.

    Raises:
        CorpusError: the vocabulary is too small for the byte alphabet, or the texts are too few to fill it.
    """
    if vocab_size < _SMALLEST:
        raise CorpusError(
            f"{vocab_size} vocabulary entries cannot hold the {_SMALLEST} bytes and control tokens",
            fix=f"ask for at least {_SMALLEST}",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    added += [AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=added,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without_markup(texts), trainer)
    # The trainer marks every reserved entry as special; only the control tokens are.
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in CONTROL_TOKENS
    tokenizer = Tokenizer.from_str(json.dumps(state, ensure_ascii=False))
    if tokenizer.get_vocab_size() != vocab_size:
        raise CorpusError(
            f"the texts fill only {tokenizer.get_vocab_size()} of {vocab_size} vocabulary entries",
            fix="give more text or ask for a smaller vocabulary",
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        mask_token=MASK,
        chat_template=default_chat_template() if chat_template is None else chat_template,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write `tokenizer.json`, its config and `chat_template.jinja` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(folder))


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load a tokenizer directory.

    Raises:
        CorpusError: there is no tokenizer, or it has no chat template.
    """
    if not (folder / "tokenizer.json").is_file():
        raise CorpusError("there is no tokenizer.json", where=str(folder), fix="point to a tokenizer directory")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    if not tokenizer.chat_template:
        raise CorpusError(
            "the tokenizer has no chat template",
            where=str(folder),
            fix="add chat_template.jinja to the directory",
        )
    return tokenizer


def tokenizer_sha256(tokenizer: PreTrainedTokenizerFast) -> str:
    """sha256 (hex) of the tokenizer's `tokenizer.json` in canonical form.

    Canonical means sorted keys, no white space, no truncation and no padding: those are settings of a caller,
    and two installed versions of a library may indent the same file differently.
    """
    state: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    state["truncation"] = state["padding"] = None
    canonical = json.dumps(state, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _without_markup(texts: Iterable[str]) -> Iterable[str]:
    # Reserved entries are cut out before merges are counted, or their pieces would fill the vocabulary.
    for text in texts:
        for token in CONTROL_TOKENS + MARKUP_TOKENS:
            text = text.replace(token, "\n\n")
        yield text
