"""End to end at batch 1: tokens a second of autoregressive, chain and tree decoding on the trained mid-size target.

Reads what gpu_ablation.py kept (target, held-out prompts, drafters). Greedy, weights in bfloat16, two ways: eager, and
with CUDA graphs (drafthouse.decode.graphs). The clock runs from the end of prefill to the last token; the texts are
compared with those of autoregressive decoding in the same way, where bfloat16 may break ties differently.

python benchmarks/gpu_decoding.py KEPT [--recipe ce-dpace]      # leaves benchmarks/results/gpu_decoding.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from rows import Rows

from drafthouse.decode import DecodeSettings, Generation, Stepper, decode
from drafthouse.decode.graphs import GraphDecoder
from drafthouse.drafter import DFlashDrafter, load_drafter
from drafthouse.target import Target

HOW = ("CUDA graphs", "eager")
BUDGETS: dict[str, int | None] = {"chain": None, "tree 16": 16, "tree 32": 32, "tree 64": 64}


def timed(
    way: Callable[[np.ndarray, int], Generation], prompts: list[np.ndarray], count: int
) -> tuple[float, list[Generation]]:
    """Seconds after prefill, and the texts. Prefill's time is that of a generation of one token."""
    way(max(prompts, key=len), count)  # kernels and graphs
    total, texts = 0.0, []
    for prompt in prompts:
        way(prompt, 1)  # kernels of a prompt of this length
        times = []
        for wanted in (1, count):
            torch.cuda.synchronize()
            began = time.perf_counter()
            text = way(prompt, wanted)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        total += times[1] - times[0]
        texts.append(text)
    return total, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kept", type=Path, help="the folder that gpu_ablation.py --keep left")
    parser.add_argument("--recipe", help="whose drafter; none: the one with the longest chain in --ablation")
    parser.add_argument("--ablation", type=Path, default=Path(__file__).parent / "results" / "gpu_ablation.json")
    parser.add_argument("--each", type=int, default=1, help="prompts of each kind")
    parser.add_argument("--how", nargs="+", choices=HOW, default=list(HOW))
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_decoding.json")
    args = parser.parse_args()

    recipe = args.recipe or best_recipe(args.ablation)
    target = Target.load(args.kept / "target", device="cuda", dtype=torch.bfloat16)
    drafter: DFlashDrafter = load_drafter(args.kept / recipe).to("cuda", torch.bfloat16).eval()
    held = json.loads((args.kept / "held.json").read_text())
    seen: dict[str, int] = {}
    prompts = []
    for one in held:
        seen[one["kind"]] = seen.get(one["kind"], 0) + 1
        if seen[one["kind"]] <= args.each:
            prompts.append(np.array(one["ids"], dtype=np.int32))
    stepper = Stepper(target, drafter.config.target_layer_ids)
    capacity = max(map(len, prompts)) + args.new_tokens + 1
    rows, count = Rows(0), args.new_tokens

    for how in args.how:
        rates: dict[str, float] = {}
        reference: list[Generation] = []
        for mode, budget in {"autoregressive": None, **BUDGETS}.items():
            draft = None if mode == "autoregressive" else drafter
            if how == "eager":
                name = "autoregressive" if draft is None else "chain" if budget is None else "tree"

                def way(prompt: np.ndarray, wanted: int, name: str = name, budget: int = budget or 1) -> Generation:
                    chosen = DecodeSettings(mode=name, budget=budget, max_new_tokens=wanted, rows=1)
                    return decode(stepper, None if name == "autoregressive" else drafter, [prompt], chosen)[0]
            else:
                way = GraphDecoder(stepper, draft, budget, capacity).decode
            seconds, texts = timed(way, prompts, count)
            reference = reference or texts
            tokens = sum(sum(text.rounds) for text in texts)
            passes = sum(len(text.rounds) for text in texts)
            rates[mode] = tokens / seconds
            rows.add(
                f"decoding: {mode}, {how}, batch 1",
                rates[mode],
                "tokens/s",
                peer=f"autoregressive, {how}",
                ratio=rates[mode] / rates["autoregressive"],
                details={
                    "tokens_a_pass": tokens / passes,
                    "milliseconds_a_pass": 1000 * seconds / passes,
                    "identical": sum(a.tokens == b.tokens for a, b in zip(texts, reference, strict=True)),
                    "prompts": len(prompts),
                    "recipe": recipe,
                },
            )
            rows.write(args.out)


def best_recipe(path: Path) -> str:
    """The recipe whose drafter had the longest chain."""
    chains = [row for row in json.loads(path.read_text()) if row["name"].endswith(", chain")]
    best = max(chains, key=lambda row: row["value"])
    return str(best["name"].removeprefix("ablation: ").removesuffix(", chain"))


if __name__ == "__main__":
    main()
