from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drafthouse.corpus import CorpusSettings, prompts
from drafthouse.decode import DecodeSettings, Stepper, decode
from drafthouse.drafter import load_drafter, save_drafter
from drafthouse.loop.tiny import embedded_target
from drafthouse.target import Target
from tests.doubles.sglang_server import package
from tests.ports import free_ports
from tests.unit.decode.pairs import TAPS, fitted_drafter

FOLDER = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(FOLDER))
NEW_TOKENS = 20


@dataclass(frozen=True)
class Engine:
    """What a gate runs against: a bundle with the double, a kept folder, and what a true engine answers."""

    bundle: Path
    kept: Path
    answers: dict[str, Any]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def port() -> int:
    """The first of the gate's four."""
    return free_ports(4)[0]


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The embedded target with a drafter that was fitted to its answers for a second."""
    folder = tmp_path_factory.mktemp("engine")
    subprocess.run(["tar", "-cf", folder / "site.tar", "-C", package(folder / "site"), "."], check=True)
    kept = folder / "kept"
    shutil.copytree(embedded_target(), kept / "target")
    target = Target.load(kept / "target", dtype=torch.bfloat16)
    asked = prompts(CorpusSettings(heldout=2, seed=5), target.tokenizer)[:8]
    held = [{"kind": one.kind, "ids": one.input_ids.tolist(), "reference": one.reference} for one in asked]
    (kept / "held.json").write_text(json.dumps(held), encoding="utf-8")

    ids = [one.input_ids for one in asked]
    plain = decode(Stepper(target), None, ids, DecodeSettings(mode="autoregressive", max_new_tokens=NEW_TOKENS))
    whole = Target.load(kept / "target")
    save_drafter(kept / "gate", fitted_drafter(whole, ids, [text.tokens for text in plain], steps=40))
    drafter = load_drafter(kept / "gate").to(torch.bfloat16)
    chain = decode(Stepper(target, TAPS), drafter, ids, DecodeSettings(max_new_tokens=NEW_TOKENS))
    answers: dict[str, Any] = {"plain": {}, "drafted": {}, "states": {}, "chat": {}}
    for one, alone, drafted in zip(asked, plain, chain, strict=True):
        key = " ".join(map(str, one.input_ids))
        answers["plain"][key] = {"output_ids": alone.tokens}
        answers["drafted"][key] = {"output_ids": drafted.tokens, "passes": len(drafted.rounds)}
        answers["states"][key] = states(target, one.input_ids, TAPS)
        said = target.tokenizer.decode(one.input_ids).partition("user\n")[2].partition("<|im_end|>")[0]
        answers["chat"][said] = target.tokenizer.decode(alone.tokens, skip_special_tokens=True)
    return Engine(folder / "site.tar", kept, answers)


def states(target: Target, ids: np.ndarray, taps: tuple[int, ...]) -> list[list[float]]:
    """Outputs of `taps` and of the last layer for every token, one row of numbers a token."""
    row = torch.from_numpy(ids.astype(np.int64)).unsqueeze(0)
    found = target.capture(row, torch.tensor([len(ids)]), taps)[0].flatten(1)
    return [[float(number) for number in token] for token in found]
