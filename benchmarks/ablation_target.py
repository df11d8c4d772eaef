"""What the loss ablation stands on: a target, its answers to the training prompts, and their states.

Everything is left in a working folder, each part whole or not there, so that a run that was cut off can go on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import midsize
import midsize_texts
import numpy as np

from drafthouse.corpus import CorpusSettings, load_tokenizer, prompts, token_samples
from drafthouse.corpus.records import Prompt, TokenSample
from drafthouse.decode import DecodeSettings, Stepper, decode
from drafthouse.decode.stats import degeneracy_guard, repeated_4grams
from drafthouse.drafter import DrafterShape
from drafthouse.loop.answers import prompt_of
from drafthouse.loop.tiny import embedded_target
from drafthouse.states import ExtractSettings, run_worker
from drafthouse.store import Store
from drafthouse.target import Target

Say = Callable[[str], None]


def shape_of(target: Target) -> Any:
    small = target.num_layers < 6
    shape = DrafterShape(
        num_hidden_layers=2 if small else 3,
        num_attention_heads=4 if small else 8,
        num_key_value_heads=2 if small else 4,
        head_dim=32 if small else 64,
        block_size=16,
        target_layer_ids=(0, 1, 2) if small else midsize.TAPS,
    )
    return shape.for_target(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
        mask_token_id=target.mask_token_id,
        identity=target.identity,
    )


def save_prompts(path: Path, asked: list[Prompt], answers: list[list[int]] | None = None) -> None:
    """Prompts with the target's answers; whole or not there."""
    rows = [
        {"id": p.id, "kind": p.kind, "ids": p.input_ids.tolist(), "reference": p.reference, "answer": a}
        for p, a in zip(asked, answers or [[] for _ in asked], strict=True)
    ]
    write(path, rows)


def load_prompts(path: Path) -> list[Prompt]:
    return [
        Prompt(one["id"], one["kind"], np.array(one["ids"], dtype=np.int32), one["reference"])
        for one in json.loads(path.read_text())
    ]


def write(path: Path, content: Any) -> None:
    """JSON, at once."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content))
    partial.rename(path)


def make_target(folder: Path, args: argparse.Namespace, say: Say, deadline: float) -> None:
    """The mid-size target in `folder`/target, and prompts to train and to judge drafters with."""
    small = args.small
    race = midsize.Race(args.device, folder / "compiled", 150.0) if args.compile == "auto" else None
    texts = midsize_texts.texts(
        folder / "tokenizer",
        vocabulary=midsize.SMALL_VOCABULARY if small else midsize.VOCABULARY,
        tool_calls=120 if small else 15_000,
        test_each=args.test_each,
        processes=1 if small else max(1, (os.cpu_count() or 1) - (2 if race else 0)),
        most=args.most,
        longest=args.longest,
    )
    say(f"{len(texts.training)} training texts of {len(texts.training.ids)} tokens: {texts.facts}")
    training = texts.train_prompts(args.train_each, args.longest)
    say(f"{len(training)} training and {len(texts.test_prompts)} held-out prompts")
    compiled = race.compiled_is_faster() if race else args.compile == "yes"
    seconds = min(args.target_seconds, max(5.0, (deadline - time.time()) / 2))
    how = midsize.training_of(args.device, small=small, compiled=compiled, seconds=seconds)
    midsize.train_target(
        texts.training, texts.held_out, folder / "tokenizer", folder / "target", how, small=small, device=args.device
    )
    save_prompts(folder / "test.json", texts.test_prompts)
    write(folder / "texts.json", texts.facts)
    save_prompts(folder / "train.json", training)


def take_embedded(folder: Path, args: argparse.Namespace) -> None:
    """The small target that travels with the package, and prompts of its own kinds."""
    shutil.copytree(embedded_target(), folder / "target")
    tokenizer = load_tokenizer(folder / "target")
    settings = CorpusSettings(samples=6 * args.train_each, heldout=args.test_each, max_tokens=224, seed=midsize.SEED)
    training = [Prompt(sample.id, sample.kind, prompt_of(sample), "") for sample in token_samples(settings, tokenizer)]
    save_prompts(folder / "test.json", prompts(settings, tokenizer))
    save_prompts(folder / "train.json", training)


def answer(folder: Path, args: argparse.Namespace, say: Say) -> dict[str, Any]:
    """The target's own answers and their states; returns what is worth recording about it."""
    report = json.loads((folder / "target" / "training.json").read_text())
    target = Target.load(folder / "target", device=args.device)
    stepper = Stepper(target)
    training, tested = load_prompts(folder / "train.json"), load_prompts(folder / "test.json")
    greedy = DecodeSettings(mode="autoregressive", max_new_tokens=args.new_tokens, rows=1024)
    held = decode(stepper, None, [prompt.input_ids for prompt in tested], greedy)
    save_prompts(folder / "held.json", tested, [one.tokens for one in held])
    ends = set(target.eos_ids)
    said = [target.tokenizer.decode([t for t in one.tokens if t not in ends]) for one in held]
    kinds = [prompt.kind for prompt in tested]
    guard = degeneracy_guard(held, said, [prompt.reference for prompt in tested], kinds)
    references = [target.tokenizer.encode(prompt.reference, add_special_tokens=False) for prompt in tested]
    guard["repeated_4grams_of_references"] = round(repeated_4grams(references), 4)
    for kind, known in guard["by_kind"].items():
        own = [one.tokens for one, its in zip(held, kinds, strict=True) if its == kind]
        known["repeated_4grams"] = round(repeated_4grams(own), 4)
    say(f"held-out texts of the target: {guard}")
    for kind in dict.fromkeys(kinds):
        place = kinds.index(kind)
        print(f"--- {kind}: …{target.tokenizer.decode(tested[place].input_ids[-40:])!r}")
        print(f"    → {said[place]!r}", flush=True)
    answers = decode(stepper, None, [prompt.input_ids for prompt in training], greedy)
    samples = []
    for prompt, text in zip(training, answers, strict=True):
        ids = np.concatenate([prompt.input_ids, np.array(text.tokens, dtype=np.int32)])
        mask = np.zeros(len(ids), dtype=np.uint8)
        mask[len(prompt.input_ids) :] = 1
        if len(text.tokens) > 2:
            samples.append(TokenSample(prompt.id, prompt.kind, ids, mask))
    answered = sum(int(s.loss_mask.sum()) for s in samples)
    say(f"{len(samples)} answers of the target, {answered} tokens")
    layers = shape_of(target).target_layer_ids
    extract = ExtractSettings(layer_ids=layers, rows=64, batch_tokens=16_384, max_tokens=512)
    shutil.rmtree(folder / "store", ignore_errors=True)
    corpus = midsize.MemoryCorpus(samples, 512)
    run_worker(Store.open(str(folder / "store")), "states", corpus, target, extract, "bench")
    say("states extracted")
    texts = folder / "texts.json"
    return {
        "parameters": report["parameters"],
        "target_tokens": report["tokens"],
        "target_steps": report["training"]["steps"],
        "target_seconds": report["seconds"],
        "target_tokens_per_s": report.get("tokens_per_s"),
        "target_epochs": report.get("epochs"),
        "held_out": report["held_out"],
        "held_out_kinds": report.get("held_out_kinds"),
        "data_sha256": report["data_sha256"],
        "texts": json.loads(texts.read_text()) if texts.exists() else None,
        "curve": report["curve"],
        "guard": guard,
        "answers": len(samples),
        "answer_tokens": answered,
        "test_prompts_sha256": midsize.fingerprint(tested),
        "kinds": kinds,
    }


def prepare(folder: Path, args: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Target, its answers and states, as far as `folder` does not hold them yet; returns facts about them."""
    began = time.perf_counter()

    def say(what: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {what}", flush=True)

    facts = folder / "facts.json"
    if not facts.exists():
        if not (folder / "train.json").exists():  # the last that is written
            shutil.rmtree(folder / "target", ignore_errors=True)
            if args.target == "embedded":
                take_embedded(folder, args)
            else:
                make_target(folder, args, say, deadline)
        report = json.loads((folder / "target" / "training.json").read_text())
        say(f"target: {report['parameters'] / 1e6:.1f} M, {report['tokens']} tokens in {report['seconds']} s, held out "
            f"{report['held_out']}, by kind {report.get('held_out_kinds')}")  # fmt: skip
        write(facts, answer(folder, args, say))
    known: dict[str, Any] = json.loads(facts.read_text())
    return known
