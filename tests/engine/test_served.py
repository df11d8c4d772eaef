"""A served model proves itself: check, canary and sweep against a real engine with a real drafter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafthouse.serve.launch import model_path
from drafthouse.serve.profile import EMBEDDED
from tests.command_line import drafthouse
from tests.engine.conftest import PROFILE, Served


def test_the_check_finds_nothing_that_stops_it(overrides: tuple[str, ...], drafter: Path) -> None:
    words = [word for override in overrides for word in ("--set", override)]
    found = drafthouse("serve", "check", PROFILE, "--model", model_path(EMBEDDED), "--draft", drafter, "--json", *words)
    result = json.loads(found.out)
    assert (found.code, result["errors"]) == (0, 0), result["findings"]
    ids = {finding["id"] for finding in result["findings"]}
    assert not {"engine-version-mismatch", "engine-pins", "draft-config-rewritten"} & ids


def test_the_canary_lives_and_drafts_are_accepted(served: Served) -> None:
    result = drafthouse("serve", "canary", *served.words, "--json").result
    assert result["passed"] is True, result["checks"]
    assert result["right"] == result["asked"] == 4
    assert result["acceptance_length"] > 1


def test_a_sweep_reads_acceptance_from_its_counters(served: Served, load_program: Path, tmp_path: Path) -> None:
    words = ["--concurrency", "1,4", "--context", "256", "--output-tokens", "32", "--rounds", "2"]
    command = ["serve", "sweep", *served.words, *words, "--program", str(load_program), "--out", str(tmp_path)]
    result = drafthouse(*command, "--json").result
    assert result["broken"] == []
    assert [point["concurrency"] for point in result["points"]] == [1, 4]
    for point in result["points"]:
        assert (point["failed"], point["asked"]) == (0, 2 * point["concurrency"])
        assert point["acceptance_source"] == "vLLM counters"
        # Sonnets are nothing that this drafter has seen: how much of them it foresees is the canary's business.
        assert 1 <= point["acceptance"] <= 4
        assert point["output_tokens"] == pytest.approx(32)
        # Prompts are made by a tokenizer, and the chat template adds its own.
        assert 256 <= point["input_tokens"] <= 300
        assert 0 < point["ttft_ms"]["p50"] <= point["ttft_ms"]["p99"]
    one, four = result["points"]
    assert four["tokens_per_s"] > one["tokens_per_s"]
    assert (tmp_path / "sweep.png").stat().st_size > 10_000


def test_another_model_is_not_swept(served: Served, load_program: Path, tmp_path: Path) -> None:
    refused = drafthouse(
        "serve", "sweep", *served.words, "--model", "other", "--program", load_program, "--out", tmp_path / "out"
    )
    assert "'other' is not served; the server lists embedded" in refused.sentence
