"""What a gate takes for evidence, and what it waits on for."""

from __future__ import annotations

import json
import secrets

import pytest

from drafthouse.fleet.gates import StepGate, train_progress
from drafthouse.fleet.runtime.protocol import UnitStatus
from drafthouse.store import Store

UNIT = UnitStatus("drafthouse-train-e1", "running", "process")


@pytest.mark.parametrize("body", [b"", b'{"step": 1', b"<html>", b"[]", b"7"])
def test_progress_that_cannot_be_made_out_is_no_evidence_yet(body: bytes) -> None:
    store = Store.open(f"memory://{secrets.token_hex(6)}")
    gate = StepGate(store, "ours", 1)
    assert gate.evidence(UNIT) is None
    store.put("drafters/ours/progress/1", body)
    assert train_progress(store, "ours", 1) is None
    assert gate.evidence(UNIT) is None
    store.put("drafters/ours/progress/1", json.dumps({"step": 3, "resumed_from": 1, "loss": 0.5}).encode())
    assert gate.evidence(UNIT) == "step 3 after resuming from 1, loss 0.5"
