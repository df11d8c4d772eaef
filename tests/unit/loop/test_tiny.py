"""`target train-tiny` and a target that a run trains for itself, at the size of a test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from drafthouse.corpus import CorpusSettings, GrammarSource, load_tokenizer, token_samples
from drafthouse.loop import steps
from drafthouse.loop.folder import RunFolder
from drafthouse.loop.tiny import embedded_target, parallel_samples, samples_sha256
from drafthouse.progress import Silent
from tests.command_line import drafthouse, files_of
from tests.loop_run import RUN_FILE

RECIPE = """\
vocab_size: 400
corpus:
  samples: 24
  heldout: 2
  max_tokens: 256
  sources:
    - {type: grammar, kind: lookup}
    - {type: grammar, kind: tool_call}
shape: {hidden_size: 32, intermediate_size: 48, num_attention_heads: 2, head_dim: 16, linear_head_dim: 16}
training: {steps: 3, rows: 4, warmup_steps: 1, log_every: 1}
"""


@pytest.fixture(scope="module", autouse=True)
def few_texts() -> Iterator[None]:
    """A vocabulary of 400 entries is filled by a few hundred texts."""
    with mock.patch("drafthouse.loop.tiny.TOKENIZER_TEXTS", 400):
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "recipe.yml").write_text(RECIPE, encoding="utf-8")
    report = drafthouse("target", "train-tiny", folder / "target", "--file", folder / "recipe.yml", "--json").result
    return folder / "target", report


class TestTrainTiny:
    def test_what_it_says_is_what_it_kept(self, trained: tuple[Path, dict[str, Any]]) -> None:
        folder, report = trained
        assert json.loads((folder / "training.json").read_text(encoding="utf-8")) == report
        assert [entry["step"] for entry in report["curve"]] == [0, 1, 2]
        assert report["guard"]["by_kind"].keys() == {"lookup", "tool_call"}
        assert "/" not in report["command"], "no path of this machine travels with the weights"
        assert report["command"].startswith("drafthouse target train-tiny target --file recipe.yml")
        assert report["python_stdlib"] is None, "its text did not come from the library"

    def test_the_model_is_a_target(self, trained: tuple[Path, dict[str, Any]]) -> None:
        folder, report = trained
        shown = drafthouse("target", "show", folder, "--json").result
        assert (shown["vocab_size"], shown["hidden_size"], shown["layers"]) == (400, 32, 4)
        assert shown["parameters"] == report["parameters"]

    def test_a_bad_recipe_is_refused_at_once(self, tmp_path: Path) -> None:
        said = drafthouse("target", "train-tiny", tmp_path / "t", "--set", "shape.num_attention_heads=3").sentence
        assert "'shape': num_attention_heads must be a multiple of num_key_value_heads" in said
        assert list(tmp_path.iterdir()) == []

    def test_a_failure_leaves_the_earlier_target(self, trained: tuple[Path, dict[str, Any]]) -> None:
        folder, _ = trained
        before = files_of(folder.parent)
        recipe = ("--file", folder.parent / "recipe.yml")
        said = drafthouse("target", "train-tiny", folder, *recipe, "--set", "training.rows=99", "--json").sentence
        assert said == "target.training.rows: 24 samples do not fill one batch of 99; build a larger corpus or lower it"
        assert files_of(folder.parent) == before


class TestFromScratch:
    def test_a_run_trains_its_own_target_once(self, tmp_path: Path) -> None:
        indented = "".join(f"  {line}\n" for line in RECIPE.splitlines())
        (tmp_path / "small.yml").write_text(f"{RUN_FILE}target:\n  from_scratch: true\n{indented}", encoding="utf-8")
        run = RunFolder.begin(tmp_path / "run", tmp_path / "small.yml")
        run.keep()
        assert steps.train_target(run, Silent()) is not None
        assert steps.train_target(run, Silent()) is None
        target = steps.load_target(run)
        assert target.hidden_size == 32
        assert drafthouse("corpus", "build", "--out", run.path, "--json").result["samples"] == 48


class TestSamples:
    def settings(self) -> CorpusSettings:
        return CorpusSettings(sources=(GrammarSource(kind="lookup"),), samples=20, seed=5)

    def test_parts_are_corpora_with_consecutive_seeds(self) -> None:
        tokenizer = load_tokenizer(embedded_target())
        made = parallel_samples(self.settings(), tokenizer, 2, Silent())
        parts = [self.settings().model_copy(update={"samples": 10, "seed": seed}) for seed in (5, 6)]
        wanted = [sample for part in parts for sample in token_samples(part, tokenizer, "train")]
        assert samples_sha256(made) == samples_sha256(wanted)

    def test_the_hash_sees_tokens_masks_and_order(self) -> None:
        tokenizer = load_tokenizer(embedded_target())
        made = parallel_samples(self.settings(), tokenizer, 1, Silent())
        assert samples_sha256(made) == samples_sha256(list(token_samples(self.settings(), tokenizer, "train")))
        assert samples_sha256(made[::-1]) != samples_sha256(made)
        changed = made[0].loss_mask.copy()
        changed[0] ^= 1
        other = type(made[0])(made[0].id, made[0].kind, made[0].input_ids, changed)
        assert samples_sha256([other, *made[1:]]) != samples_sha256(made)
