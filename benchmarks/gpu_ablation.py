"""Which loss trains the better drafter? Five recipes at equal tokens on a mid-size hybrid target, several seeds.

Trains the target (midsize.py), lets it answer the training prompts, extracts its states once, trains a drafter for each
recipe and seed on the same batches, and decodes the same held-out prompts with each: chain, and tree of a budget of
64. Greedy decoding in float32; texts are compared with the target's own. Intervals are 95 % bootstrap over prompts and
seeds together. Every finished (recipe, seed) is a file, and the rows are written anew after each; with --stay a run
that was cut off goes on where it was.

python benchmarks/gpu_ablation.py --folder /dev/shm      # some eleven minutes of an H200
python benchmarks/gpu_ablation.py --device cpu --small --folder /tmp --out /tmp/rows.json --keep /tmp/ablation
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import midsize
from ablation_rows import BUDGET, RECIPES, add_rows, finished
from ablation_target import prepare, shape_of, write
from rows import Rows

from drafthouse.decode import DecodeSettings, Stepper, decode
from drafthouse.drafter import TrainSettings, train
from drafthouse.states import StatesReader
from drafthouse.store import Store
from drafthouse.target import Target

# Defaults of --small: the whole way in some minutes of two cores.
SMALL: dict[str, Any] = {
    "target_seconds": 20.0,
    "compile": "no",
    "most": 0.5,
    "train_each": 6,
    "test_each": 2,
    "new_tokens": 16,
    "steps": 8,
    "rows": 4,
    "anchors": 4,
    "seeds": 1,
}


def work(recipe: str, folder: Path, device: str, seeds: list[int]) -> None:
    """Train and judge one recipe with some seeds; a result file a seed."""
    plan = json.loads((folder / "plan.json").read_text())
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // plan["processes"]))
    target = Target.load(folder / "target", device=device)
    config = shape_of(target)
    reader = StatesReader(Store.open(str(folder / "store")), "states", in_memory_bytes=64 << 30)
    held = json.loads((folder / "held.json").read_text())
    asked = [np.array(one["ids"], dtype=np.int32) for one in held]
    took = 0.0
    for seed in seeds:
        result_file = folder / f"result-{recipe}-{seed}.json"
        if result_file.exists():
            continue
        began = time.time()
        if began + took > plan["deadline"]:
            print(f"{recipe}: no time for seed {seed}", flush=True)
            return
        settings = TrainSettings.model_validate(
            {
                "steps": plan["steps"],
                "rows": plan["rows"],
                "anchors": plan["anchors"],
                "seed": seed,
                "optimizer": {"kind": "muon", "lr": 2e-3, "muon_lr": 5e-3},
                "autocast": "off" if device == "cpu" else "bf16",
                "log_every": max(1, plan["steps"] // 40),
                "checkpoint_every": 10**6,
                "export_dtype": "float32",
            }
            | RECIPES[recipe]
            | {"loss": RECIPES[recipe]["loss"] | {"chunk_blocks": 1024}}
        )
        out = folder / f"{recipe}-{seed}"
        shutil.rmtree(out, ignore_errors=True)
        result = train(reader, target, config, settings, out)
        model = result.model.float()
        stepper = Stepper(target, config.target_layer_ids)
        found: dict[str, Any] = {"recipe": recipe, "seed": seed, "loss": result.loss, "train_s": result.seconds}
        for mode in ("chain", "tree"):
            start = time.perf_counter()
            chosen = DecodeSettings(mode=mode, budget=BUDGET, max_new_tokens=plan["new_tokens"], rows=len(asked))
            texts = decode(stepper, model, asked, chosen)
            found[mode] = {
                "tokens": [sum(text.rounds) for text in texts],
                "passes": [len(text.rounds) for text in texts],
                "identical": sum(text.tokens == one["answer"] for text, one in zip(texts, held, strict=True)),
                "seconds": time.perf_counter() - start,
            }
        chain, tree = (sum(found[mode]["tokens"]) / max(1, sum(found[mode]["passes"])) for mode in ("chain", "tree"))
        found["tokens_seen"] = result.tokens
        print(
            f"{recipe} seed {seed}: loss {result.loss:.4f} trained {result.seconds:.0f} s, chain {chain:.3f} in "
            f"{found['chain']['seconds']:.0f} s, tree {tree:.3f} in {found['tree']['seconds']:.0f} s",
            flush=True,
        )
        write(result_file, found)
        took = time.time() - began


def start(folder: Path, devices: list[str], seeds: int, recipes: list[str]) -> list[subprocess.Popen[bytes]]:
    """A process for each of `recipes` and device, which share the seeds.

    Side by side on a device: at this size a step is bound by launches, not by the device.
    """
    command = [sys.executable, str(Path(__file__)), "--work"]
    return [
        subprocess.Popen([*command, recipe, str(folder), device, *map(str, range(seeds)[place :: len(devices)])])
        for place, device in enumerate(devices)
        for recipe in recipes
    ]


def ablate(folder: Path, facts: dict[str, Any], args: argparse.Namespace, deadline: float) -> None:
    """All recipes and seeds until the deadline; rows whenever one more has ended."""
    devices = args.devices.split(",") if args.devices else [args.device]
    plan = {key: getattr(args, key) for key in ("steps", "rows", "anchors", "new_tokens")}
    recipes = [args.only_drafter] if args.only_drafter else list(RECIPES)
    write(folder / "plan.json", plan | {"deadline": deadline, "processes": len(devices) * len(recipes)})
    rows = Rows(midsize.SEED)
    children = start(folder, devices, args.seeds, recipes)
    known = 0
    try:
        while any(child.poll() is None for child in children) and time.time() < deadline:
            time.sleep(1.0)
            if (count := len(list(folder.glob("result-*.json")))) > known:
                known = count
                if runs := finished(folder):
                    with contextlib.redirect_stdout(io.StringIO()):
                        rows.rows.clear()
                        add_rows(rows, facts, runs)
                    rows.write(args.out)
                keep(folder, args.keep)
    finally:
        for child in children:
            child.kill()
            child.wait()
    failed = [str(child.args) for child in children if child.returncode not in (0, -9)]
    keep(folder, args.keep)
    if args.only_drafter and not failed:
        return
    rows.rows.clear()
    add_rows(rows, facts, finished(folder))
    rows.write(args.out)
    if failed:
        raise SystemExit(f"{len(failed)} of {len(children)} processes failed")
    if len(rows.rows) < 4:
        raise SystemExit("no seed came to a result for every recipe: give it a later --deadline")


def keep(folder: Path, kept: Path | None) -> None:
    """Target, held-out prompts, results, and the first seed's drafters, as far as they are there."""
    if kept is None:
        return
    kept.mkdir(parents=True, exist_ok=True)
    for name, path in kept_files(folder):
        if path.is_dir() and not (kept / name).exists():
            shutil.copytree(path, kept / (name + ".partial"), dirs_exist_ok=True)
            (kept / (name + ".partial")).rename(kept / name)
        elif path.is_file():
            shutil.copy(path, kept / name)


def kept_files(folder: Path) -> Iterator[tuple[str, Path]]:
    for name in ("target", "held.json", "facts.json"):
        if (folder / name).exists():
            yield name, folder / name
    for path in folder.glob("result-*.json"):
        yield path.name, path
        if path.stem.endswith("-0"):
            recipe = path.stem.removeprefix("result-").removesuffix("-0")
            yield recipe, folder / f"{recipe}-0" / "drafter"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--devices", help="train drafters on these, e.g. cuda:0,cuda:1; none: on --device")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--folder", type=Path, help="where the working folder is made, and removed at the end")
    parser.add_argument("--stay", type=Path, help="a working folder that stays; what it holds is not made again")
    parser.add_argument("--keep", type=Path, help="copy target, prompts, results and the first seed's drafters here")
    parser.add_argument("--target", choices=("midsize", "embedded"), default="midsize", help="trained here, or shipped")
    parser.add_argument("--target-seconds", type=float, default=240.0, help="of its training, compiling left out")
    parser.add_argument(
        "--compile",
        nargs="?",
        choices=("auto", "yes", "no"),
        default="auto",
        const="yes",
        help="auto: what trains faster",
    )
    parser.add_argument("--most", type=float, default=400.0, help="megabytes of source text")
    parser.add_argument("--longest", type=int, default=288, help="tokens of a prompt")
    parser.add_argument("--train-each", type=int, default=1000, help="training prompts of each kind")
    parser.add_argument("--test-each", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--anchors", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--deadline", type=float, default=840.0, help="seconds after which it ends with what it has")
    parser.add_argument("--only-target", action="store_true", help="stop when target, answers and states are made")
    parser.add_argument("--only-drafter", choices=RECIPES, help="train this one, for --keep: nothing is compared")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_ablation.json")
    parser.add_argument("--work", nargs="+", metavar="WORD", help=argparse.SUPPRESS)
    if "--small" in sys.argv:
        parser.set_defaults(**SMALL)
    args = parser.parse_args()
    if args.work:
        recipe, folder, device, *seeds = args.work
        work(recipe, Path(folder), device, [int(seed) for seed in seeds])
        return
    deadline = time.time() + args.deadline
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # worker processes are forked
    with contextlib.ExitStack() as stack:
        if args.stay is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.folder)))
        else:
            folder = args.stay
            folder.mkdir(parents=True, exist_ok=True)
        facts = prepare(folder, args, deadline)
        keep(folder, args.keep)
        torch.cuda.empty_cache()
        if not args.only_target:
            ablate(folder, facts, args, deadline)


if __name__ == "__main__":
    main()
