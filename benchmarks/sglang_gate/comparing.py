"""What is compared between a server and our own decoder, and the rows that it leaves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rows import Rows

from drafthouse.decode import Generation
from drafthouse.serve.canary import canary_of
from drafthouse.serve.collect import collect_facts
from drafthouse.serve.preflight import preflight
from drafthouse.states.settings import EngineSettings
from drafthouse.states.sglang import SglangTaps
from sglang_gate import account
from sglang_gate.asking import Answer, Client
from sglang_gate.own import Own
from sglang_gate.servers import Server

LARGEST_CAPTURE_ERROR = 0.02
BATCHES = (1, 8)
CAPTURES = 3


class Gate:
    """Rows as they come, and the clock that everything has to keep to."""

    def __init__(self, out: Path, deadline: float) -> None:
        self.rows, self.out = Rows(0), out
        self.began = time.monotonic()
        self.end = self.began + deadline

    def left(self, reserve: float = 0.0) -> float:
        return max(0.0, self.end - reserve - time.monotonic())

    def said(self, what: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {what}", flush=True)

    def add(self, name: str, value: float, unit: str, *, peer: str, ratio: float, **more: Any) -> None:
        if value > 0 and ratio > 0:
            self.rows.add(f"sglang: {name}", value, unit, peer=peer, ratio=ratio, **more)
            self.rows.write(self.out)
        else:
            self.open(name, unit, f"{value:g} {unit}", peer=peer, **more)

    def open(self, name: str, unit: str, why: str, *, peer: str, bar: float | None = None, details: Any = None) -> None:
        """A bar that stays open, and why."""
        details = {"why": why, **(details or {})}
        with redirect_stdout(StringIO()):  # there is no figure to print
            self.rows.add(f"sglang: {name}", 1, unit, peer=peer, ratio=1, bar=bar, details=details)
        self.rows.rows[-1] |= {"value": None, "ratio": None, "met": None}
        self.said(f"{name}: {why}")
        self.rows.write(self.out)


def compare_texts(
    gate: Gate, name: str, peer: str, judge: Own, prompts: list[np.ndarray], one: Sequence[Sequence[int]],
    other: Sequence[Sequence[int]], bar: float | None,
) -> None:  # fmt: skip
    """Row of equal texts; a text that parts at a near-tie counts for the bar and is listed with its gap."""
    parted = [account.parting(judge.target, *three) for three in zip(prompts, one, other, strict=True)]
    equal = sum(parting is None for parting in parted)
    ties = [(i, p.place, p.gap, p.steps) for i, p in enumerate(parted) if p is not None and p.near_tie]
    wide = [(i, p.place, p.gap, p.steps) for i, p in enumerate(parted) if p is not None and not p.near_tie]
    details = {
        "prompts": len(prompts),
        "tokens": [len(text) for text in one],
        "near_ties": [{"prompt": i, "token": at, "gap": gap, "bfloat16_steps": steps} for i, at, gap, steps in ties],
        "differences": [
            {"prompt": i, "token": at, "gap": str(gap), "bfloat16_steps": str(s)} for i, at, gap, s in wide
        ],
        "near_tie_steps": account.TIE_STEPS,
    }
    share = (equal + len(ties)) / len(prompts)
    gate.add(name, equal, "equal texts", peer=peer, ratio=share, bar=bar, details=details)


def compare_passes(gate: Gate, layout: str, ours: Own, judge: Own, prompts: list[np.ndarray], drafted: list[Answer],
                   evaluated: list[Generation]) -> None:  # fmt: skip
    """Rows of verify passes (against our chain over the server's texts) and of acceptance (against our evaluation)."""
    if any(answer.passes is None and len(answer.tokens) > 1 for answer in drafted):
        why = "the server reports no verify passes: it did not draft"
        gate.open(f"verify passes, {layout}", "passes", why, peer="our chain over the same texts", bar=0.95)
        return
    served = [int(answer.passes or 0) for answer in drafted]
    texts = [answer.tokens for answer in drafted]
    replays = {}
    for name, own in (("bfloat16", ours), ("float32", judge)):
        replays[name] = [len(rounds) for rounds in account.replayed(own.stepper, own.drafter, prompts, texts)]
    total, own_total = sum(served), sum(replays["bfloat16"])
    details = {
        "server": served,
        "ours": replays,
        "equal_prompts": sum(a == b for a, b in zip(served, replays["bfloat16"], strict=True)),
        "block": ours.drafter.config.block_size,
        "layer_types": list(ours.drafter.config.layer_types),
        "taps": list(ours.drafter.config.target_layer_ids),
    }
    ratio = min(total, own_total) / max(1, total, own_total)
    peer = "our chain over the same texts"
    gate.add(f"verify passes, {layout}", total, "passes", peer=peer, ratio=ratio, bar=0.95, details=details)
    length = sum(len(text) - 1 for text in texts) / total
    own_length = sum(sum(g.rounds) for g in evaluated) / sum(len(g.rounds) for g in evaluated)
    gate.add(
        f"acceptance length, {layout}", length, "tokens a pass", peer="our evaluation in float32",
        ratio=min(length, own_length) / max(length, own_length), bar=0.95,
        details={"ours": own_length, "tokens": sum(map(len, texts)), "passes": total},
    )  # fmt: skip


def compare_states(gate: Gate, client: Client, own: Own, prompts: list[np.ndarray]) -> None:
    """Row of the worst relative error of a captured tap; the layers beside it are the control."""
    taps, width = own.stepper.layer_ids, own.target.hidden_size
    every = list(range(own.target.num_layers))
    errors: dict[int, list[float]] = {tap: [] for tap in taps}
    nearest: dict[int, list[float]] = {tap: [] for tap in taps}
    for prompt in prompts:
        found = torch.from_numpy(client.states(prompt, len(taps) * width)).view(len(prompt), len(taps), width)
        ids = torch.from_numpy(prompt.astype(np.int64)).unsqueeze(0)
        right = own.target.capture(ids, torch.tensor([len(prompt)]), every)[0].float().cpu()
        for slot, tap in enumerate(taps):
            by_layer = [float((found[:, slot] - right[:, i]).norm() / right[:, i].norm()) for i in every]
            errors[tap].append(by_layer.pop(tap))
            nearest[tap].append(min(by_layer))
    worst = max(1e-9, *(max(each) for each in errors.values()))
    gate.add(
        "captured states, worst tap", worst, "relative error", peer="our capture through transformers, bfloat16",
        ratio=LARGEST_CAPTURE_ERROR / worst, bar=1.0,
        details={
            "taps": {str(tap): statistics.fmean(each) for tap, each in errors.items()},
            "nearest_other_layer": {str(tap): statistics.fmean(each) for tap, each in nearest.items()},
            "tokens": sum(map(len, prompts)),
        },
    )  # fmt: skip


def compare_written(gate: Gate, server: Server, storage: Path, own: Own, prompts: list[np.ndarray]) -> None:
    """Rows of the states that the server writes by our plug-in: their worst error, and how fast they come."""
    layers, target = own.stepper.layer_ids, own.target
    settings = EngineSettings(kind="sglang", url=server.url, storage=storage, timeout_s=60.0)
    served = SglangTaps(target, settings, layers)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.from_numpy(prompt.astype(np.int64))
    found = served.capture(ids, lengths, layers).float()
    names = [*map(str, layers), "before the norm"]
    errors: dict[str, list[float]] = {name: [] for name in names}
    nearest: dict[str, list[float]] = {name: [] for name in names}
    every = list(range(target.num_layers))
    for row, length in enumerate(lengths.tolist()):
        alone = ids[row : row + 1, :length]
        right = target.capture(alone, torch.tensor([length]), every)[0].float().cpu()
        for slot, name in enumerate(names):
            layer = layers[slot] if slot < len(layers) else every[-1]
            by_layer = [float((found[row, :length, slot] - right[:, i]).norm() / right[:, i].norm()) for i in every]
            errors[name].append(by_layer.pop(layer))
            nearest[name].append(min(by_layer))
    worst = max(1e-9, *(max(each) for each in errors.values()))
    gate.add(
        "states written by the plug-in, worst layer", worst, "relative error",
        peer="our capture through transformers, bfloat16", ratio=LARGEST_CAPTURE_ERROR / worst, bar=1.0,
        details={
            "layers": {name: statistics.fmean(each) for name, each in errors.items()},
            "nearest_other_layer": {name: statistics.fmean(each) for name, each in nearest.items()},
            "tokens": int(lengths.sum()),
        },
    )  # fmt: skip
    rates = []
    for taps in (served, target):
        taps.capture(ids, lengths, layers)
        began = time.monotonic()
        for _ in range(CAPTURES):
            taps.capture(ids, lengths, layers).cpu()
        rates.append(CAPTURES * int(lengths.sum()) / (time.monotonic() - began))
    gate.add(
        "states written by the plug-in", rates[0], "tokens/s", peer="our capture of the same batch",
        ratio=rates[0] / rates[1], details={"rows": len(prompts), "bytes_a_token": 2 * len(names) * target.hidden_size},
    )  # fmt: skip


def speed(client: Client, prompts: list[np.ndarray]) -> dict[int, float]:
    """Tokens a second at batch 1 and 8, prefill and protocol included; everything was asked before."""
    rates = {}
    for batch in (size for size in BATCHES if size <= len(prompts)):
        groups = [prompts[i : i + batch] for i in range(0, len(prompts) - batch + 1, batch)]
        done = [client.texts(group) for group in groups]
        tokens = sum(len(answer.tokens) for answers, _ in done for answer in answers)
        rates[batch] = tokens / sum(seconds for _, seconds in done)
    return rates


def compare_layout(
    gate: Gate, layout: str, plain: Server, dflash: Server, ours: Own, judge: Own, chosen: list[dict[str, Any]],
    evaluated: list[Generation], new_tokens: int,
) -> None:  # fmt: skip
    """All comparisons of one pair of servers."""
    prompts = [np.array(one["ids"], dtype=np.int32) for one in chosen]
    clients = [Client(server.url, ours.target.eos_ids, new_tokens) for server in (plain, dflash)]
    texts, drafted = (client.texts(prompts[:1])[0] for client in clients)  # kernels of a first request
    texts, drafted = ([client.texts([prompt])[0][0] for prompt in prompts] for client in clients)
    gate.said(f"{layout}: asked {len(prompts)} prompts of both servers")
    both = [[answer.tokens for answer in answers] for answers in (texts, drafted)]
    peer = "SGLang without drafts"
    compare_texts(gate, f"greedy texts with drafts, {layout}", peer, judge, prompts, both[1], both[0], 1.0)
    own = [one["own"] for one in chosen]
    compare_texts(gate, f"greedy texts, {layout}", "our decoder in bfloat16", judge, prompts, both[0], own, None)
    compare_passes(gate, layout, ours, judge, prompts, drafted, evaluated)
    rates = [speed(client, prompts) for client in clients]
    for batch in rates[0]:
        gate.add(f"no drafts, {layout}, batch {batch}", rates[0][batch], "tokens/s", peer="-", ratio=1.0)
        gate.add(
            f"DFLASH, {layout}, batch {batch}", rates[1][batch], "tokens/s",
            peer=peer, ratio=rates[1][batch] / rates[0][batch], details={"ready_s": dflash.ready_s},
        )  # fmt: skip


def prove(gate: Gate, server: Server) -> None:
    """Preflight of the profile that was launched, and its canary over the chat endpoint."""
    findings = preflight(server.profile, collect_facts(server.profile))
    report = canary_of(server.profile, server.url)
    gate.add(
        "canary over the chat endpoint", report.right, "right answers", peer="our decoder's own answers",
        ratio=report.right / max(1, report.asked), bar=server.profile.canary.min_right,
        details={
            "asked": report.asked,
            "passed": report.passed,
            "acceptance_length": report.acceptance_length,
            "failed": [f"{check.name}: {check.sentence}" for check in report.checks if not check.passed],
            "preflight": [f"{f.severity} {f.id}: {f.sentence}" for f in findings if f.severity != "note"],
        },
    )  # fmt: skip
