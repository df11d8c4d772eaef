"""The benchmark of the corpus at scale runs, at a size that fits a test."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from transformers import PreTrainedTokenizerFast

from drafthouse.corpus import save_tokenizer

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("corpus_scale", FOLDER / "corpus_scale.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "corpus_scale", module)
    spec.loader.exec_module(module)
    return module


def test_synthetic_records_go_the_whole_way(
    benchmark: ModuleType, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    writer = benchmark.Writer(0)
    for form in benchmark.SHARES:
        writer.write(form, 150, tmp_path / f"{form}.jsonl")
    result = benchmark.scale(600, tmp_path, tmp_path / "tokenizer", 1)
    left = sum(sum(counts.values()) for counts in result["drops"].values())
    assert 0 < left < 60
    assert result["samples"] > 500
    assert result["rss_parent"] > 10
    assert result["tokenise_cpu_s"] > 0


def test_both_contenders_are_measured_on_the_same_texts(
    benchmark: ModuleType, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    rows = benchmark.Rows(0)
    benchmark.templates(rows, tmp_path / "tokenizer", "small", 200, 2)
    assert [row["peer"] for row in rows.rows] == ["tokenizers encode_batch", "tokenizers encode_batch_fast"]
    assert all(row["ratio"] > 0.1 for row in rows.rows)
