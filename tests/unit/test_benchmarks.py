"""The benchmark script runs, every result that is kept has the same rows, and the page says why a bar is not met."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.patience import until

FOLDER = Path(__file__).parents[2] / "benchmarks"
PEERS = ("speculators", "specforge")
KEYS = {"name", "value", "unit", "peer", "ratio", "bar", "met", "machine", "versions", "seed", "command", "date"}


def check(path: Path) -> list[dict[str, object]]:
    rows = json.loads(path.read_text(encoding="utf-8"))
    assert rows
    for row in rows:
        assert set(row) - {"details"} == KEYS  # what plots need beyond the figure
        if row["value"] is None:  # a bar that is open says why
            assert (row["ratio"], row["met"]) == (None, None)
            assert row["details"]["why"]
            continue
        assert row["ratio"] > 0
        assert row["value"] > 0
        assert row["met"] is (None if row["bar"] is None else row["ratio"] >= row["bar"])
    return list(rows)


def test_the_rooms_are_measured_against_their_peers(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    words = [sys.executable, str(FOLDER / "cpu_rooms.py"), "--quick", "--out", str(out)]
    subprocess.run(words, check=True, capture_output=True, timeout=200)
    names = {str(row["name"]).partition(":")[0] for row in check(out)}
    assert names == {"states", "decode", "drafter", "Muon in float32 on a CPU"}
    assert str(tmp_path) not in out.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted((FOLDER / "results").glob("*.json")), ids=lambda path: path.name)
def test_results_that_are_kept_have_these_rows(path: Path) -> None:
    check(path)


def script(name: str) -> ModuleType:
    """A benchmark as a module; scripts find their neighbours beside themselves."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_a_trainer_waits_at_the_gate_between_warm_up_and_clock(tmp_path: Path) -> None:
    peers = script("peer_trainers")
    plan = {"warmup": 2, "steps": 3}
    clock = peers.Clock(tmp_path, "one", plan)
    clock.parameters = 7
    marked: list[int] = []

    def train() -> None:
        for step in range(peers.steps_of(plan)):
            clock.mark()
            marked.append(step)

    trainer = threading.Thread(target=train)
    trainer.start()
    until((tmp_path / "one.ready").exists, "the end of the warm-up")
    time.sleep(0.2)
    assert marked == [0], "the last step of the warm-up waits"
    assert not (tmp_path / "one.json").exists()
    (tmp_path / "one.go").touch()
    trainer.join(240)
    assert clock.done
    result = json.loads((tmp_path / "one.json").read_text())
    assert len(result["step_seconds"]) == 3
    assert sum(result["step_seconds"]) < 0.2, "the wait is not timed"
    assert result["parameters"] == 7


def test_shards_of_the_27b_are_even_in_number_so_that_ranks_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    shape = script("shape27b")
    for tokens in (1, 5_000, 40_000):
        shards = shape.long_shards(tokens, 128)
        assert len(shards) % 2 == 0
        assert sum(map(sum, shards)) >= tokens
        assert all(64 <= length <= 128 for shard in shards for length in shard)
    corpus = shape.RandomCorpus(shards, 512)
    assert corpus.tokens == sum(map(sum, shards))
    assert len(corpus.shard(corpus.shard_names[0])) == 8


def test_the_page_names_a_cause_for_every_bar_that_is_not_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = script("measured_page")
    monkeypatch.setattr(page, "DOCS", tmp_path)
    text = page.page()
    every = [row for path in (FOLDER / "results").glob("gpu_*.json") for row in json.loads(path.read_text())]
    assert any(row["met"] is False for row in every)
    assert "the cause is not known" not in text
    for row in every:
        if row["bar"] is not None:
            assert f"| {row['name']} |" in text
    unknown = {"name": "a new one", "met": False, "value": 1.0, "peer": "-"}
    missing = {"name": "another", "met": None, "value": None, "peer": "-", "details": {"why": "no time"}}
    assert page.reasons([unknown, missing]) == [
        "- a new one: the cause is not known.",
        "- Not measured: another. The cause: no time.",
    ]


def test_the_page_is_made_of_the_results_that_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = script("measured_page")
    kept = (page.DOCS / "measured.md").read_text(encoding="utf-8")
    monkeypatch.setattr(page, "DOCS", tmp_path)
    assert page.page() == kept, "run python benchmarks/measured_page.py"


def test_the_readme_tells_what_the_results_say() -> None:
    def ratio(file: str, name: str, peer: str) -> float:
        rows = json.loads((FOLDER / "results" / f"{file}.json").read_text(encoding="utf-8"))
        return next(float(row["ratio"]) for row in rows if row["name"].startswith(name) and row["peer"] == peer)

    told = " ".join((FOLDER.parent / "README.md").read_text(encoding="utf-8").split())
    memory = {peer: ratio("gpu_training", f"training: peak device memory of {peer}", "times ours") for peer in PEERS}
    for sentence in (
        f"our trainer makes {ratio('gpu_training', 'training: ours', 'speculators'):.2f} times the tokens/s of",
        f"in {100 / memory['speculators']:.0f} % of its memory",
        f"and {ratio('gpu_training', 'training: ours', 'specforge'):.2f} times those of SpecForge",
        f"SpecForge 0.2 in {100 / memory['specforge']:.0f} %.",
        f"accepts {ratio('gpu_ablation', 'ablation: kl-streak, chain', 'ce-decay'):.2f} times the tokens a pass",
        f"at {100 * ratio('gpu_extraction', 'extraction: capture and', 'plain forward of the same batches'):.0f} % of",
    ):
        assert sentence in told
