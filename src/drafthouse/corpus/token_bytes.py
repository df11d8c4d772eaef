"""What every token of a byte-level vocabulary stands for, so that whole batches are decoded as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from drafthouse.corpus.records import Ids


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of every token id, and their number int64 [V] (-1: no such token)."""

    pieces: list[bytes]
    lengths: npt.NDArray[np.int64]

    def joined(self, ids: Ids) -> bytes:
        """The bytes that `ids` stand for."""
        return b"".join(map(self.pieces.__getitem__, ids.tolist()))


def token_bytes(tokenizer: Tokenizer) -> TokenBytes | None:
    """The table of a byte-level tokenizer, compared with the tokenizer's own decoding of every single token.

    None where decoding is not a mere join of bytes (SentencePiece's word marks, WordPiece's `##`).
    """
    if type(tokenizer.decoder) is not ByteLevel:
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values()) + 1
    alphabet = byte_alphabet()
    pieces, lengths = [b""] * size, np.full(size, -1, dtype=np.int64)
    for token, number in vocabulary.items():
        # As the decoder does: a token with a character outside of the alphabet is taken as it is written.
        known = [alphabet.get(character) for character in token]
        pieces[number] = token.encode() if None in known else bytes(byte for byte in known if byte is not None)
        lengths[number] = len(pieces[number])
    ids = sorted(vocabulary.values())
    decoded = tokenizer.decode_batch([[number] for number in ids], skip_special_tokens=False)
    if any(text != pieces[number].decode("utf-8", "replace") for number, text in zip(ids, decoded, strict=True)):
        return None
    return TokenBytes(pieces, lengths)


def byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in a byte-level vocabulary (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
