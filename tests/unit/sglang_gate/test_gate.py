"""The export gate as a whole, against a double of SGLang: what a true engine passes, and what each fault leaves."""

from __future__ import annotations

import copy
import json
import socket
import time
from pathlib import Path
from typing import Any

import gpu_sglang
import numpy as np
import pytest
import torch
from sglang_gate.comparing import LARGEST_CAPTURE_ERROR

from drafthouse.target import Target
from tests.unit.sglang_gate.conftest import NEW_TOKENS, Engine, states

BARS = {
    "greedy texts with drafts, wrapper",
    "verify passes, wrapper",
    "acceptance length, wrapper",
    "captured states, worst tap",
    "states written by the plug-in, worst layer",
    "canary over the chat endpoint",
}


def run(
    engine: Engine, answers: dict[str, Any], port: int, out: Path, monkeypatch: pytest.MonkeyPatch, *more: str
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit status and rows by name."""
    (out / "answers.json").write_text(json.dumps(answers), encoding="utf-8")
    monkeypatch.setenv("DOUBLE_ANSWERS", str(out / "answers.json"))
    words = ["gpu_sglang.py", "--bundle", engine.bundle, "--kept", engine.kept, "--recipe", "gate", "--no-compile"]
    words += ["--device", "cpu", "--prompts", "8", "--new-tokens", NEW_TOKENS, "--port", port]
    words += ["--folder", out, "--logs", out / "logs", "--out", out / "rows.json", *more]
    monkeypatch.setattr("sys.argv", [str(word) for word in words])
    try:
        gpu_sglang.main()
        code = 0
    except SystemExit as end:
        code = int(str(end.code))
    rows = json.loads((out / "rows.json").read_text(encoding="utf-8"))
    assert not list(out.glob("sglang-gate-*"))
    return code, {row["name"].removeprefix("sglang: "): row for row in rows}


def listening(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def test_an_engine_that_does_as_we_do_meets_every_bar(
    engine: Engine, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, rows = run(engine, engine.answers, port, tmp_path, monkeypatch)
    assert code == 0
    assert {name for name, row in rows.items() if row["bar"] is not None} == BARS
    assert all(rows[name]["met"] for name in BARS)
    passes = rows["verify passes, wrapper"]
    assert passes["details"]["server"] == passes["details"]["ours"]["bfloat16"]
    assert passes["details"]["equal_prompts"] == 8
    assert rows["acceptance length, wrapper"]["value"] > 1.1  # else equal counts would say nothing
    control = rows["captured states, worst tap"]["details"]
    assert min(control["nearest_other_layer"].values()) > 5 * LARGEST_CAPTURE_ERROR
    assert rows["canary over the chat endpoint"]["details"]["failed"] == []
    assert not any(listening(port + number) for number in range(4))


def test_every_fault_leaves_its_bar_open(
    engine: Engine, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = copy.deepcopy(engine.answers)
    target = Target.load(engine.kept / "target", dtype=torch.bfloat16)
    for key, drafted in answers["drafted"].items():
        drafted["passes"] += 2
        answers["states"][key] = states(target, np.array(key.split(), dtype=np.int32), (1, 2, 3))
    longest = max(answers["drafted"].values(), key=lambda one: len(one["output_ids"]))
    longest["output_ids"][3] = 700
    answers["chat"] = {}
    code, rows = run(engine, answers, port, tmp_path, monkeypatch)
    assert code == 1
    assert {name for name, row in rows.items() if row["bar"] is not None and not row["met"]} == BARS
    texts = rows["greedy texts with drafts, wrapper"]
    assert texts["value"] == 7
    [difference] = texts["details"]["differences"]
    assert (difference["token"], texts["details"]["near_ties"]) == (3, [])
    assert rows["captured states, worst tap"]["value"] > 0.1


def test_a_server_that_dies_is_named_with_its_reason(
    engine: Engine, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, rows = run(engine, engine.answers | {"fault": "dies"}, port, tmp_path, monkeypatch)
    assert code == 1
    for name in ("greedy texts with drafts, wrapper", "canary over the chat endpoint"):
        row = rows[name]
        assert (row["value"], row["ratio"], row["met"]) == (None, None, None)
        assert row["details"]["why"] == "dflash-wrapper was not ready: RuntimeError: no kernel for this shape"
    assert rows["captured states, worst tap"]["met"] is True


def test_servers_that_never_come_do_not_outlast_the_deadline(
    engine: Engine, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    code, rows = run(engine, engine.answers | {"fault": "late"}, port, tmp_path, monkeypatch, "--deadline", "30")
    assert time.monotonic() - began < 300
    assert code == 1
    assert [row["value"] for row in rows.values() if row["bar"] is not None] == [None] * 4
    assert not any(listening(port + number) for number in range(4))


def test_a_damaged_bundle_is_said(engine: Engine, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "site.tar"
    broken.write_bytes(b"no archive")
    with pytest.raises(RuntimeError, match=r"site\.tar cannot be unpacked"):
        run(Engine(broken, engine.kept, {}), {}, port, tmp_path, monkeypatch)
    [row] = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert (row["name"], row["met"]) == ("sglang: the gate", None)
    assert "cannot be unpacked" in row["details"]["why"]
