"""Which loss trains the better drafter? Five recipes at equal tokens on a mid-size hybrid target, several seeds.

Trains the target (midsize.py), lets it answer the training prompts, extracts its states once, trains a drafter for each
recipe and seed on the same batches, and decodes the same held-out prompts with each: chain, and tree of a budget of
64. Greedy decoding in float32; texts are compared with the target's own. Intervals are 95 % bootstrap over prompts and
seeds together.

python benchmarks/gpu_ablation.py --folder /dev/shm      # some eight minutes of an H200
python benchmarks/gpu_ablation.py --device cpu --small --folder /tmp --out /tmp/rows.json --keep /tmp/ablation
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import midsize
from rows import Rows

from drafthouse.corpus import CorpusSettings, load_tokenizer, prompts, token_samples
from drafthouse.corpus.records import Prompt, TokenSample
from drafthouse.decode import DecodeSettings, Stepper, decode
from drafthouse.decode.stats import degeneracy_guard
from drafthouse.drafter import DrafterShape, TrainSettings, train
from drafthouse.loop.answers import prompt_of
from drafthouse.loop.tiny import embedded_target
from drafthouse.states import ExtractSettings, StatesReader, run_worker
from drafthouse.store import Store
from drafthouse.target import Target

BASELINE, BUDGET = "ce-decay", 64
RECIPES: dict[str, dict[str, Any]] = {
    "ce-decay": {"loss": {"weights": "decay"}},
    "ce-dpace": {"loss": {"weights": "dpace"}},
    "kl-decay": {"loss": {"weights": "decay", "soft_weight": 1.0}},
    "kl-streak": {"loss": {"weights": "streak", "soft_weight": 1.0}},
    "kl-streak-noise": {
        "loss": {"weights": "streak", "soft_weight": 1.0},
        "noise": {"kind": "cosine", "sigma": 0.05},
    },
}


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


def save_prompts(path: Path, asked: list[Prompt], answers: list[list[int]]) -> None:
    rows = [
        {"id": p.id, "kind": p.kind, "ids": p.input_ids.tolist(), "reference": p.reference, "answer": a}
        for p, a in zip(asked, answers, strict=True)
    ]
    path.write_text(json.dumps(rows))


def work(recipe: str, folder: Path) -> None:
    """Train and judge one recipe with every seed; a result file a seed."""
    plan = json.loads((folder / "plan.json").read_text())
    target = Target.load(folder / "target", device=plan["device"])
    config = shape_of(target)
    reader = StatesReader(Store.open(str(folder / "store")), "states", in_memory_bytes=64 << 30)
    held = json.loads((folder / "held.json").read_text())
    asked = [np.array(one["ids"], dtype=np.int32) for one in held]
    for seed in range(plan["seeds"]):
        if time.time() > plan["deadline"]:
            print(f"{recipe}: no time for seed {seed}", flush=True)
            return
        settings = TrainSettings.model_validate(
            {
                "steps": plan["steps"],
                "rows": plan["rows"],
                "anchors": plan["anchors"],
                "seed": seed,
                "optimizer": {"kind": "muon", "lr": 2e-3, "muon_lr": 5e-3},
                "autocast": "bf16" if plan["device"] != "cpu" else "off",
                "log_every": max(1, plan["steps"] // 40),
                "checkpoint_every": 10**6,
                "export_dtype": "float32",
            }
            | RECIPES[recipe]
            | {"loss": RECIPES[recipe]["loss"] | {"chunk_blocks": 1024}}
        )
        out = folder / f"{recipe}-{seed}"
        result = train(reader, target, config, settings, out)
        model = result.model.eval().requires_grad_(False)
        model.attention = "split"
        stepper = Stepper(target, config.target_layer_ids)
        found: dict[str, Any] = {"recipe": recipe, "seed": seed, "loss": result.loss, "train_s": result.seconds}
        for mode in ("chain", "tree"):
            began = time.perf_counter()
            chosen = DecodeSettings(mode=mode, budget=BUDGET, max_new_tokens=plan["new_tokens"], rows=len(asked))
            texts = decode(stepper, model, asked, chosen)
            found[mode] = {
                "tokens": [sum(text.rounds) for text in texts],
                "passes": [len(text.rounds) for text in texts],
                "identical": sum(text.tokens == one["answer"] for text, one in zip(texts, held, strict=True)),
                "seconds": time.perf_counter() - began,
            }
        chain = sum(found["chain"]["tokens"]) / sum(found["chain"]["passes"])
        tree = sum(found["tree"]["tokens"]) / sum(found["tree"]["passes"])
        found["tokens_seen"] = result.tokens
        print(
            f"{recipe} seed {seed}: loss {result.loss:.4f} trained {result.seconds:.0f} s, chain {chain:.3f} in "
            f"{found['chain']['seconds']:.0f} s, tree {tree:.3f} in {found['tree']['seconds']:.0f} s",
            flush=True,
        )
        (folder / f"result-{recipe}-{seed}.json").write_text(json.dumps(found))


def read_texts(folder: Path, args: argparse.Namespace) -> midsize.Texts:
    """The texts and their tokenizer (in `folder`); taken from `--texts` where it holds them, else left there."""
    kept: Path | None = args.texts
    if kept is not None and (kept / "texts.pickle").exists():
        shutil.copytree(kept / "tokenizer", folder / "tokenizer")
        made: midsize.Texts = pickle.loads((kept / "texts.pickle").read_bytes())
        return made
    made = midsize.texts(
        folder / "tokenizer",
        vocabulary=1024 if args.small else 4096,
        tool_calls=60 if args.small else 15_000,
        train_each=6 if args.small else args.train_each,
        test_each=3 if args.small else args.test_each,
        processes=1 if args.small else os.cpu_count() or 1,
        most=150 if args.small else None,
    )
    if kept is not None:
        shutil.copytree(folder / "tokenizer", kept / "tokenizer", dirs_exist_ok=True)
        (kept / "texts.pickle").write_bytes(pickle.dumps(made))
    return made


def embedded(folder: Path, args: argparse.Namespace) -> tuple[midsize.Texts, dict[str, Any]]:
    """The small target that travels with the package, and prompts of its own kinds."""
    shutil.copytree(embedded_target(), folder / "target")
    tokenizer = load_tokenizer(folder / "target")
    settings = CorpusSettings(samples=6 * args.train_each, heldout=args.test_each, max_tokens=224, seed=midsize.SEED)
    training = [Prompt(sample.id, sample.kind, prompt_of(sample), "") for sample in token_samples(settings, tokenizer)]
    report = json.loads((folder / "target" / "training.json").read_text())
    return midsize.Texts([], [], training, prompts(settings, tokenizer)), report


def prepare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Target, its answers and states; returns what is worth recording about them."""
    small, device = args.small, args.device
    began = time.perf_counter()

    def said(what: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {what}", flush=True)

    if args.target == "embedded":
        texts, report = embedded(folder, args)
    else:
        texts = read_texts(folder, args)
        tokens = sum(len(sample.input_ids) for sample in texts.samples)
        said(f"{len(texts.samples)} samples of {tokens} tokens, {len(texts.test_prompts)} held-out prompts")
        report = midsize.train_target(
            texts, folder / "tokenizer", folder / "target", midsize.TinyShape() if small else midsize.SHAPE,
            rows=8 if small else 96, seconds=args.target_seconds, device=device,
        )  # fmt: skip
    said(f"target: {report['parameters'] / 1e6:.1f} M, {report['tokens']} tokens, held out {report['held_out']}")
    target = Target.load(folder / "target", device=device)
    stepper = Stepper(target)
    asked = texts.train_prompts
    greedy = DecodeSettings(mode="autoregressive", max_new_tokens=args.new_tokens, rows=1024)
    answers = decode(stepper, None, [prompt.input_ids for prompt in asked], greedy)
    samples = []
    for prompt, answer in zip(asked, answers, strict=True):
        ids = np.concatenate([prompt.input_ids, np.array(answer.tokens, dtype=np.int32)])
        mask = np.zeros(len(ids), dtype=np.uint8)
        mask[len(prompt.input_ids) :] = 1
        if len(answer.tokens) > 2:
            samples.append(TokenSample(prompt.id, prompt.kind, ids, mask))
    said(f"{len(samples)} answers of the target, {sum(int(s.loss_mask.sum()) for s in samples)} tokens")
    held = decode(stepper, None, [prompt.input_ids for prompt in texts.test_prompts], greedy)
    save_prompts(folder / "held.json", texts.test_prompts, [one.tokens for one in held])
    ends = set(target.eos_ids)
    said_texts = [target.tokenizer.decode([t for t in one.tokens if t not in ends]) for one in held]
    kinds = [prompt.kind for prompt in texts.test_prompts]
    guard = degeneracy_guard(held, said_texts, [prompt.reference for prompt in texts.test_prompts], kinds)
    said(f"held-out texts of the target: {guard}")
    for kind in dict.fromkeys(kinds):
        place = kinds.index(kind)
        print(f"--- {kind}: …{target.tokenizer.decode(texts.test_prompts[place].input_ids[-40:])!r}")
        print(f"    → {said_texts[place]!r}", flush=True)
    layers = shape_of(target).target_layer_ids
    extract = ExtractSettings(layer_ids=layers, rows=64, batch_tokens=16_384, max_tokens=512)
    run_worker(
        Store.open(str(folder / "store")), "states", midsize.MemoryCorpus(samples, 512), target, extract, "bench"
    )
    said("states extracted")
    return {
        "parameters": report["parameters"],
        "target_tokens": report["tokens"],
        "target_steps": report["training"]["steps"],
        "target_seconds": report["seconds"],
        "held_out": report["held_out"],
        "data_sha256": report["data_sha256"],
        "curve": report["curve"],
        "guard": guard,
        "answers": len(samples),
        "answer_tokens": sum(int(s.loss_mask.sum()) for s in samples),
        "test_prompts_sha256": midsize.fingerprint(texts.test_prompts),
        "kinds": kinds,
    }


def bootstrap(results: list[dict[str, Any]], mode: str, chosen: np.ndarray, draws: int = 2000) -> tuple[float, ...]:
    """Micro acceptance (tokens a target pass) over prompts `chosen` and all seeds, with its 95 % interval."""
    tokens = np.array([one[mode]["tokens"] for one in results])[:, chosen]
    passes = np.array([one[mode]["passes"] for one in results])[:, chosen]
    random = np.random.RandomState(0)
    seeds = random.randint(0, len(results), (draws, len(results)))
    places = random.randint(0, tokens.shape[1], (draws, tokens.shape[1]))
    spread = [
        tokens[np.ix_(s, p)].sum() / max(1, passes[np.ix_(s, p)].sum()) for s, p in zip(seeds, places, strict=True)
    ]
    low, high = np.percentile(spread, [2.5, 97.5])
    return float(tokens.sum() / max(1, passes.sum())), float(low), float(high)


def gain(ours: list[dict[str, Any]], base: list[dict[str, Any]], mode: str, draws: int = 2000) -> tuple[float, ...]:
    """Ratio of micro acceptances with its 95 % interval; prompts and seeds are paired."""
    both = [[np.array([one[mode][key] for one in side]) for key in ("tokens", "passes")] for side in (ours, base)]
    random = np.random.RandomState(0)
    count, prompts = both[0][0].shape

    def ratio(s: np.ndarray, p: np.ndarray) -> float:
        at = np.ix_(s, p)
        rates = [side[0][at].sum() / max(1, side[1][at].sum()) for side in both]
        return float(rates[0] / rates[1])

    spread = [ratio(random.randint(0, count, count), random.randint(0, prompts, prompts)) for _ in range(draws)]
    low, high = np.percentile(spread, [2.5, 97.5])
    return ratio(np.arange(count), np.arange(prompts)), float(low), float(high)


def report(rows: Rows, facts: dict[str, Any], folder: Path) -> None:
    """Rows for every recipe, kind of prompt and mode."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("result-*.json")):
        one = json.loads(path.read_text())
        found.setdefault(one["recipe"], []).append(one)
    if len(found) < len(RECIPES):
        raise SystemExit(f"only {', '.join(found) or 'no recipe'} came to a result: give it more --seconds")
    # Seeds that not every recipe had time for would make the comparison unequal.
    common = set.intersection(*({one["seed"] for one in runs} for runs in found.values()))
    found = {
        name: sorted((one for one in runs if one["seed"] in common), key=lambda one: one["seed"])
        for name, runs in found.items()
    }
    kinds = np.array(facts["kinds"])
    everything = np.arange(len(kinds))
    rows.add("ablation: target", facts["parameters"] / 1e6, "M parameters", peer="-", ratio=1.0, details=facts)
    rows.add("ablation: seeds of every recipe", len(common), "seeds", peer="-", ratio=1.0)
    for recipe in (name for name in RECIPES if name in found):
        runs = found[recipe]
        for mode in ("chain", "tree"):
            value, low, high = bootstrap(runs, mode, everything)
            ratio, worst, best = gain(runs, found[BASELINE], mode)
            own = mode == "chain" and recipe.startswith("kl-streak")
            details = {
                "interval": [low, high],
                "ratio_interval": [worst, best],
                "seeds": [sum(one[mode]["tokens"]) / sum(one[mode]["passes"]) for one in runs],
                "identical": [one[mode]["identical"] for one in runs],
                "prompts": len(kinds),
                "tokens_seen": runs[0]["tokens_seen"],
                "loss": [one["loss"] for one in runs],
                "kinds": {
                    str(kind): bootstrap(runs, mode, np.flatnonzero(kinds == kind)) for kind in dict.fromkeys(kinds)
                },
            }
            rows.add(
                f"ablation: {recipe}, {mode}",
                value,
                "tokens a pass",
                peer=BASELINE,
                ratio=ratio,
                bar=1.1 if own else None,
                details=details,
            )
        chain, tree = (bootstrap(runs, mode, everything)[0] for mode in ("chain", "tree"))
        rows.add(
            f"ablation: {recipe}, drafts accepted a pass by the tree",
            tree - 1,
            "drafts a pass",
            peer="chain",
            ratio=(tree - 1) / max(1e-9, chain - 1),
            bar=1.25,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--keep", type=Path, help="copy target, prompts and the first seed's drafters here")
    parser.add_argument("--target", choices=("midsize", "embedded"), default="midsize", help="trained here, or shipped")
    parser.add_argument("--target-seconds", type=float, default=140.0)
    parser.add_argument("--train-each", type=int, default=1400, help="training prompts of each kind")
    parser.add_argument("--test-each", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--anchors", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=440.0, help="no further seed is begun after this")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds that a begun seed gets beyond --seconds")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_ablation.json")
    parser.add_argument("--texts", type=Path, help="keep the tokenised texts here, and take them from here")
    parser.add_argument("--only-texts", action="store_true", help="stop when the texts are made (no GPU needed)")
    parser.add_argument("--work", nargs=2, metavar=("RECIPE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work[0], Path(args.work[1]))
        return
    deadline = time.time() + args.seconds
    rows = Rows(midsize.SEED)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        if args.only_texts:
            read_texts(folder, args)
            return
        facts = prepare(folder, args)
        keys = ("device", "small", "steps", "rows", "anchors", "seeds", "new_tokens")
        plan = {key: getattr(args, key) for key in keys} | {"deadline": deadline}
        (folder / "plan.json").write_text(json.dumps(plan))
        if args.keep:
            args.keep.mkdir(parents=True, exist_ok=True)
            shutil.copytree(folder / "target", args.keep / "target", dirs_exist_ok=True)
            shutil.copy(folder / "held.json", args.keep)
        torch.cuda.empty_cache()
        command = [sys.executable, str(Path(__file__)), "--work"]
        # Side by side: at this size a step is bound by launches, not by the device.
        children = [subprocess.Popen([*command, recipe, str(folder)]) for recipe in RECIPES]
        for child in children:
            try:
                child.wait(max(1.0, deadline + args.patience - time.time()))
            except subprocess.TimeoutExpired:
                child.kill()
        report(rows, facts, folder)
        rows.write(args.out)
        if args.keep:
            for path in folder.glob("*-0/drafter"):
                shutil.copytree(path, args.keep / path.parent.name.removesuffix("-0"), dirs_exist_ok=True)


if __name__ == "__main__":
    main()
