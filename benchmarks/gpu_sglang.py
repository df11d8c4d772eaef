"""The export gate on a real SGLang: does the engine do with our drafter what our own decoder says it will?

A served target without drafts, with DFLASH, and twice with its layer outputs captured (as JSON, and written by our
plug-in), all on one GPU. Compared: greedy texts
with and without drafts; verify passes of the server with our chain over the same texts; acceptance length with our own
evaluation; captured states with ours; answers over the chat endpoint with ours; and tokens a second. Where two texts
part, our float32 pass says how close the two tokens were.

The engine's packages come as one archive, since its versions of transformers and tokenizers are not ours.

python benchmarks/gpu_sglang.py --bundle site.tar.xz --kept kept --recipe ce-dpace   # a few minutes of an H200
python benchmarks/gpu_sglang.py --bundle site.tar.xz                  # trains a small target and its drafter first
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from sglang_gate import small
from sglang_gate.asking import Client
from sglang_gate.comparing import Gate, compare_layout, compare_states, compare_written, prove
from sglang_gate.folders import serveable
from sglang_gate.own import Own, chosen_prompts, questions
from sglang_gate.servers import Server, profile_of, wait_ready
from sglang_gate.world import World

from drafthouse.drafter import load_drafter, save_drafter
from drafthouse.plugins.sglang_states import FOLDER, LAYERS

COMPILING_S, ASKING_S, ENDING_S = 20.0, 30.0, 12.0


class EndedError(Exception):
    """The clock ran out, or somebody ended the run."""


def end_early(number: int, _: Any) -> None:
    raise EndedError("no time was left" if number == signal.SIGALRM else "it was told to end")


def run(gate: Gate, args: argparse.Namespace, work: Path, stack: ExitStack) -> None:
    """Everything in turn; what was started is ended by `stack`."""
    world = World(work / "world")
    world.unpack(args.bundle, args.kernels)
    if args.compile:
        world.compile()
        stack.callback(world.stop)
    gate.said("packages unpacked")
    kept, recipe, facts = args.kept, args.recipe, {}
    if kept is None:
        kept, recipe = work / "small", small.RECIPE
        kept.mkdir()
        facts = small.make(kept, device=args.device, embedded=args.target == "embedded", **args.small)
        gate.said("trained")
    folders = {layout: serveable(kept / "target", work / layout, layout) for layout in args.layouts}
    # What is served is what the exporter writes, whatever dtype was kept.
    drafter = save_drafter(work / "drafter", load_drafter(kept / recipe))
    ours = Own(kept / "target", drafter, args.device, torch.bfloat16)
    facts |= {"recipe": recipe, "block": ours.drafter.config.block_size, "taps": list(ours.stepper.layer_ids)}
    facts |= {"drafter_layers": list(ours.drafter.config.layer_types)}
    gate.add("target", ours.target.parameters / 1e6, "M parameters", peer="-", ratio=1.0, details=facts)
    held = json.loads((kept / "held.json").read_text(encoding="utf-8"))
    chosen = chosen_prompts(held, ours, args.prompts, args.new_tokens)
    gate.said(f"{len(chosen)} prompts, answers of {[len(one['own']) for one in chosen]} tokens")
    done = world.compiled(min(COMPILING_S, gate.left() / 8))
    gate.said("sources compiled" if done else "sources are still being compiled")

    if args.keep_kernels:
        stack.callback(world.keep_kernels, args.keep_kernels)
    plans: list[tuple[str, str, dict[str, Any], dict[str, str]]] = []
    asked = questions(chosen, ours.target.tokenizer, 4)
    drafting = {"draft": drafter, "questions": asked}
    for layout in args.layouts:
        hook = {"TAPTEXT": "1"} if layout == "text" else {}
        plans += [("plain", layout, {}, hook), ("dflash", layout, drafting, hook)]
    taps = ",".join(map(str, ours.stepper.layer_ids))
    plans.append(("capture", args.layouts[0], {"capture": True}, {"TAPS": taps, **plans[0][3]}))
    storage = work / "states"
    plans.append(("states", args.layouts[0], {"states": True}, {FOLDER: str(storage), LAYERS: taps}))
    logs = args.logs or work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    servers: dict[str, Server] = {}
    for number, (role, layout, more, environment) in enumerate(plans):
        name = f"{role}-{layout}"
        profile = profile_of(name, folders[layout], args.port + number, python=str(world.python), **more)
        servers[name] = Server(profile, logs, environment)
        stack.callback(servers[name].stop)
    gate.said(f"launched {', '.join(servers)}")

    judge = Own(kept / "target", drafter, args.device, torch.float32)
    prompts = [np.array(one["ids"], dtype=np.int32) for one in chosen]
    evaluated = judge.decode("chain", prompts, args.new_tokens)
    gate.said("decoded by ourselves")
    wait_ready(list(servers.values()), gate.end - ENDING_S - min(ASKING_S * len(args.layouts), gate.left() / 3))
    for name, server in servers.items():
        gate.said(f"{name}: " + (f"ready after {server.ready_s:.0f} s" if server.ready_s else f"no: {server.why()}"))

    for layout in args.layouts:
        pair = (servers[f"plain-{layout}"], servers[f"dflash-{layout}"])
        proof = partial(compare_layout, gate, layout, *pair, ours, judge, chosen, evaluated, args.new_tokens)
        attempt(gate, f"greedy texts with drafts, {layout}", "equal texts", 1.0, pair, proof)
    capture, drafted = servers[f"capture-{args.layouts[0]}"], servers[f"dflash-{args.layouts[0]}"]
    client = Client(capture.url, ours.target.eos_ids, args.new_tokens)
    proof = partial(compare_states, gate, client, ours, prompts[:4])
    attempt(gate, "captured states, worst tap", "relative error", 1.0, [capture], proof)
    writing = servers[f"states-{args.layouts[0]}"]
    proof = partial(compare_written, gate, writing, storage, ours, prompts)
    attempt(gate, "states written by the plug-in, worst layer", "relative error", 1.0, [writing], proof)
    if asked:
        proof = partial(prove, gate, drafted)
        attempt(gate, "canary over the chat endpoint", "right answers", 0.75, [drafted], proof)
    gate.said("asked everything")


def attempt(gate: Gate, name: str, unit: str, bar: float, needed: Sequence[Server], proof: Callable[[], None]) -> None:
    """Make a proof; what stops it leaves the bar open with the reason, and the other proofs their turn."""
    why = "; ".join(f"{one.profile.name} was not ready: {one.why()}" for one in needed if one.ready_s is None)
    if not why:
        try:
            return proof()
        except EndedError:
            raise
        except Exception as error:
            traceback.print_exc()
            dying = [f"{one.profile.name} died: {one.why()}" for one in needed if not one.alive]
            why = "; ".join([f"{type(error).__name__}: {error}", *dying])
    return gate.open(name, unit, why, peer="-", bar=bar)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True, help="SGLang and what it needs, an archive (bundle.py)")
    parser.add_argument("--kernels", type=Path, help="kernels that an earlier run kept; a path without a file is none")
    parser.add_argument("--keep-kernels", type=Path, help="keep compiled kernels here, as .tar.gz")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="sources, once for all")
    parser.add_argument("--kept", type=Path, help="the folder that gpu_ablation.py --keep left; none: make one")
    parser.add_argument("--recipe", default="ce-dpace", help="whose drafter of --kept")
    parser.add_argument("--target", choices=("train", "embedded"), default="train", help="without --kept")
    parser.add_argument("--layouts", nargs="+", choices=("wrapper", "text"), default=["wrapper"])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--device", default="cuda", help="of our own decoder")
    parser.add_argument("--port", type=int, default=31_000, help="first of the servers' ports, on the loopback address")
    parser.add_argument("--deadline", type=float, default=240.0, help="seconds for everything")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs here")
    parser.add_argument("--folder", type=Path, help="where the work folder is made")
    parser.add_argument("--small", type=json.loads, default={}, help="sizes of what is made without --kept, as JSON")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_sglang.json")
    args = parser.parse_args()

    gate = Gate(args.out, args.deadline)
    signal.signal(signal.SIGALRM, end_early)
    signal.signal(signal.SIGTERM, end_early)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, args.deadline - ENDING_S))
    work = Path(tempfile.mkdtemp(prefix="sglang-gate-", dir=args.folder))
    failed = True
    try:
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, work, ignore_errors=True)
            try:
                run(gate, args, work, stack)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            failed = False
    finally:
        if failed:
            why = f"{type(sys.exc_info()[1]).__name__}: {sys.exc_info()[1]}"
            gate.open("the gate", "comparisons", f"it ended early: {why}", peer="-", bar=1.0)
        gate.said("ended")
    if any(row["bar"] is not None and not row["met"] for row in gate.rows.rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
