"""Training texts, held-out texts and prompts of the mid-size target, made of midsize_sources.py by many processes.

What a held-out file, word or question says is never trained on: files are split by name, and a held-out answer that
also stands in a training file is left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from midsize import SEED
from midsize_sources import bfcl, files, humaneval, of_file

from drafthouse.corpus import grammar, load_tokenizer, save_tokenizer, train_tokenizer
from drafthouse.corpus.grammar import GRAMMAR_KINDS
from drafthouse.corpus.records import Conversation, Prompt, TokenSample
from drafthouse.corpus.sources import split_of_file
from drafthouse.corpus.template import ChatTemplate, render_text
from drafthouse.corpus.tokenizer import default_chat_template
from drafthouse.loop.answers import prompt_of
from drafthouse.target.flat import FlatTexts

MAX_TOKENS = 448
BFCL_REPEATS = 4  # small beside the rest
KINDS = ("code", "prose", *GRAMMAR_KINDS, "bfcl", "humaneval")


@dataclass(frozen=True)
class Job:
    """What one call of a worker process makes: files, numbers of the generator, or BFCL's questions."""

    files: tuple[tuple[str, Path], ...] = ()
    kind: str = ""
    first: int = 0
    count: int = 0

    def conversations(self) -> Iterator[Conversation]:
        if self.kind == "bfcl":
            yield from bfcl("train")
        elif self.kind:
            kind: Any = self.kind
            yield from islice(grammar.conversations(kind, SEED, "train", self.first), self.count)
        for name, path in self.files:
            yield from of_file(name, path)


@dataclass(frozen=True)
class Made:
    """A job's samples, with the kind (index into `KINDS`) and two hashes of each: of all of it, and of its answer."""

    texts: FlatTexts
    kinds: np.ndarray
    whole: np.ndarray
    answers: np.ndarray


_template: ChatTemplate | None = None


def _begin(folder: Path) -> None:
    global _template
    torch.set_num_threads(1)
    _template = ChatTemplate(load_tokenizer(folder))


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def answer_hash(sample: TokenSample) -> int:
    return _hash(sample.input_ids[sample.loss_mask.astype(bool)].tobytes())


def _work(job: Job) -> Made:
    assert _template is not None
    samples: list[TokenSample] = []
    conversations = job.conversations()
    while part := list(islice(conversations, 2048)):
        samples += [one for one in _template.samples(part, MAX_TOKENS) if isinstance(one, TokenSample)]
    return Made(
        FlatTexts.of(samples),
        np.array([KINDS.index(sample.kind) for sample in samples], dtype=np.int8),
        np.array([_hash(sample.input_ids.tobytes()) for sample in samples], dtype=np.uint64),
        np.array([answer_hash(sample) for sample in samples], dtype=np.uint64),
    )


def jobs(training: Sequence[tuple[str, Path]], tool_calls: int) -> list[Job]:
    """Work in pieces of a second or so, the order fixed."""
    found = [Job(kind="bfcl")]
    size = 2000
    for kind in GRAMMAR_KINDS:
        found += [Job(kind=kind, first=at, count=min(size, tool_calls - at)) for at in range(0, tool_calls, size)]
    part: list[tuple[str, Path]] = []
    filled = 0
    for name, path in training:
        part.append((name, path))
        filled += path.stat().st_size
        if filled > 1_500_000:
            found.append(Job(files=tuple(part)))
            part, filled = [], 0
    return [*found, Job(files=tuple(part))]


@dataclass(frozen=True)
class Texts:
    """What targets and drafters are made and judged with; `kinds`: index into `KINDS` of every training text."""

    training: FlatTexts
    kinds: np.ndarray
    held_out: dict[str, list[TokenSample]]
    test_prompts: list[Prompt]
    facts: dict[str, Any]

    def train_prompts(self, each: int, longest: int) -> list[Prompt]:
        """Up to `each` prompts of every kind that are no longer than `longest`, drawn by the seed."""
        found = []
        order = np.random.RandomState(SEED).permutation(len(self.training))
        for kind, name in enumerate(KINDS):
            count = 0
            for number in (int(one) for one in order[self.kinds[order] == kind]):
                ids, mask = self.training.text(number)
                sample = TokenSample(f"{name}-{number}", name, ids.astype(np.int32), mask)
                prompt = prompt_of(sample)
                if len(prompt) <= longest and count < each:
                    found.append(Prompt(sample.id, name, prompt, ""))
                    count += 1
                if count == each:
                    break
        return found


def texts(
    folder: Path, *, vocabulary: int, tool_calls: int, test_each: int, processes: int, most: float, longest: int
) -> Texts:
    """Read, split and tokenise; the tokenizer is trained on the way and written to `folder`.

    Args:
        tool_calls: conversations of each kind of the generator.
        most: megabytes of source files.
        longest: tokens of a held-out prompt at most.
    """
    chosen = files(most)
    training = [one for one in chosen if split_of_file(one[0]) == "train"]
    held_files = [one for one in chosen if split_of_file(one[0]) == "heldout"]
    tokenizer = train_tokenizer(_tokenizer_texts(training, tool_calls), vocabulary)
    save_tokenizer(tokenizer, folder)
    work = jobs(training, tool_calls)
    if processes == 1:
        _begin(folder)
        made = [_work(job) for job in work]
    else:
        with ProcessPoolExecutor(processes, initializer=_begin, initargs=(folder,)) as pool:
            made = list(pool.map(_work, work))
    whole = np.concatenate([part.whole for part in made])
    kinds = np.concatenate([part.kinds for part in made])
    kept = np.zeros(len(whole), dtype=bool)
    kept[np.unique(whole, return_index=True)[1]] = True
    twice = int((~kept).sum())
    more = made[:1] * (BFCL_REPEATS - 1)
    kept = np.concatenate([kept, *(np.ones(len(part.kinds), dtype=bool) for part in more)])
    kinds = np.concatenate([kinds, *(part.kinds for part in more)])
    made += more
    joined = select(FlatTexts.joined([part.texts for part in made]), kept)
    seen = {int(one) for part in made for one in part.answers}
    held, test = _held_out(folder, held_files, seen, test_each, longest)
    sizes = {name: int(joined.lengths[kinds[kept] == number].sum()) for number, name in enumerate(KINDS)}
    digest = hashlib.sha256("\n".join(name for name, _ in chosen).encode()).hexdigest()
    facts = {
        "files": len(chosen),
        "megabytes": round(sum(path.stat().st_size for _, path in chosen) / 1e6, 1),
        "names_sha256": digest,
        "tokens": sizes,
        "twice": twice,
    }
    return Texts(joined, kinds[kept], held, test, facts)


def select(texts: FlatTexts, kept: np.ndarray) -> FlatTexts:
    """The texts that `kept` (bool `[texts]`) says."""
    on = np.repeat(kept, texts.lengths)
    return FlatTexts(texts.ids[on], texts.mask[on], np.cumsum(texts.lengths[kept], dtype=np.int64))


def _tokenizer_texts(training: Sequence[tuple[str, Path]], tool_calls: int) -> Iterator[str]:
    template = default_chat_template()
    for kind in GRAMMAR_KINDS:
        for one in islice(grammar.conversations(kind, SEED, "train"), min(400, tool_calls)):
            yield render_text(one, template)
    for one in islice(bfcl("train"), 400):
        yield render_text(one, template)
    order = np.random.RandomState(SEED).permutation(len(training))[:1200]
    for name, path in (training[place] for place in order):
        for one in islice(of_file(name, path), 40):
            yield "\n".join(message.content for message in one.messages)


def _held_out(
    folder: Path, held_files: Sequence[tuple[str, Path]], seen: set[int], each: int, longest: int
) -> tuple[dict[str, list[TokenSample]], list[Prompt]]:
    """Samples for the held-out loss (4 x `each` of a kind at most) and `each` prompts of a kind."""
    template = ChatTemplate(load_tokenizer(folder))
    random = np.random.RandomState(SEED)
    pools: dict[str, list[Conversation]] = {name: [] for name in KINDS}
    for place in random.permutation(len(held_files))[:400]:
        for one in islice(of_file(*held_files[place]), 200):
            pools[one.kind].append(one)
    for kind in GRAMMAR_KINDS:
        pools[kind] = list(islice(grammar.conversations(kind, SEED, "heldout"), 6 * each))
    pools["bfcl"], pools["humaneval"] = list(bfcl("heldout")), list(humaneval())
    samples: dict[str, list[TokenSample]] = {}
    prompts: list[Prompt] = []
    for kind, pool in pools.items():
        drawn = [pool[place] for place in random.permutation(len(pool))][: 40 * each]
        found = list(zip(drawn, template.samples(drawn, MAX_TOKENS), strict=True))
        # Answers to the generator's questions may be alike; its words are not.
        strict = kind in ("code", "prose")
        usable = [
            (one, sample)
            for one, sample in found
            if isinstance(sample, TokenSample) and not (strict and answer_hash(sample) in seen)
        ]
        samples[kind] = [sample for _, sample in usable[: 4 * each]]
        asked = (template.prompt(one) for one, _ in usable)
        prompts += list(islice((p for p in asked if isinstance(p, Prompt) and len(p.input_ids) <= longest), each))
    return samples, prompts
