"""What the steps leave behind, on a finished run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from drafthouse.corpus import CorpusReader
from drafthouse.corpus.records import Prompt
from drafthouse.decode.generate import Generation
from drafthouse.drafter.metrics import read_metrics
from drafthouse.errors import ConfigError, CorpusError, DrafterError
from drafthouse.loop import steps
from drafthouse.loop.folder import RunFolder
from drafthouse.progress import Silent
from drafthouse.states import StatesReader
from drafthouse.target import Target
from tests.command_line import files_of
from tests.loop_run import SHARDS, Walked


@pytest.fixture(scope="module")
def evaluation(walked: Walked) -> dict[str, Any]:
    found: dict[str, Any] = walked.results["evaluate"]["ours"]
    return found


class TestTwice:
    """Every step finds its work done: nothing is written again."""

    def test_steps(self, run: Path) -> None:
        folder = RunFolder.open(run)
        target, before = steps.load_target(folder), files_of(run)
        assert steps.train_target(folder, Silent()) is None, "not asked for"
        steps.build_corpus(folder, target, Silent())
        assert steps.answering(folder).work(target, "w", Silent()) == 0
        steps.answering(folder).seal(target)
        assert steps.extract(folder, target, "w", Silent()).shards == 0
        assert steps.train_drafter(folder, target, "ours", Silent()).resumed_from == 12
        clock = steps.wall_clock(folder, target)
        assert clock == folder.read("wall-clock")
        after = files_of(run)
        assert {name for name in after if after[name] != before.get(name)} <= {
            name for name in after if name.endswith(".clock")
        }


class TestStates:
    def test_the_layers_are_the_drafters(self, walked_run: RunFolder, target: Target) -> None:
        spec = StatesReader(walked_run.store, steps.STATES).spec
        assert spec.layer_ids == steps.extract_settings(walked_run, target).layer_ids == (0, 2)
        assert spec.target == target.identity
        assert spec.corpus == CorpusReader(walked_run.store, steps.ANSWERS).manifest.digest
        assert spec.shards == SHARDS

    def test_no_answer_is_cut(self, walked_run: RunFolder) -> None:
        reader = StatesReader(walked_run.store, steps.STATES)
        assert reader.tokens == CorpusReader(walked_run.store, steps.ANSWERS).manifest.tokens


class TestTraining:
    def test_the_curve_has_held_out_acceptance(self, walked_run: RunFolder) -> None:
        rows = read_metrics(walked_run.drafter_path("ours") / "metrics.jsonl")
        measured = {row["step"]: row["evaluation"]["acceptance"] for row in rows if "evaluation" in row}
        assert sorted(measured) == [6, 12]
        assert all(1.0 <= value <= 4.0 for value in measured.values())

    def test_without_probe_prompts_there_is_none(self, walked_run: RunFolder, target: Target) -> None:
        silent = walked_run.settings.model_copy(
            update={"probe": walked_run.settings.probe.model_copy(update={"prompts": 0})}
        )
        assert steps._probe(RunFolder(walked_run.path, silent), target) is None

    def test_the_drafter_is_of_the_runs_shape_and_target(self, walked_run: RunFolder, target: Target) -> None:
        config = steps.load_trained(walked_run, target, "ours").config
        assert config == steps.drafter_config(walked_run, target)
        assert (config.block_size, config.target_layer_ids, config.target_identity) == (4, (0, 2), target.identity)


class TestEvaluation:
    def test_texts_are_the_targets_own(self, evaluation: dict[str, Any]) -> None:
        assert evaluation["prompts"] == 4, "two of each kind"
        assert evaluation["identical"] == {"chain": 4, "tree": 4}
        assert set(evaluation["modes"]["tree"]["by_budget"]) == {"4", "8"}
        assert evaluation["modes"]["tree"]["budget"] == 8

    def test_figures_fit_together(self, evaluation: dict[str, Any]) -> None:
        alone = evaluation["autoregressive"]
        assert alone["tokens"] == alone["target_passes"], "a token a pass"
        for mode in ("chain", "tree"):
            stats = evaluation["modes"][mode]
            assert stats["micro"] == pytest.approx(stats["tokens"] / stats["target_passes"], abs=1e-3)
            assert stats["tokens"] == alone["tokens"], "the same texts, in fewer passes"
            assert sum(kind["prompts"] for kind in stats["by_kind"].values()) == 4

    def test_marked_texts_spell_the_generations(self, evaluation: dict[str, Any]) -> None:
        assert [sample["kind"] for sample in evaluation["samples"]] == ["lookup", "tool_call"], (
            "one of every kind first"
        )
        for sample in evaluation["samples"]:
            texts = {mode: "".join(t["text"] for t in run["tokens"]) for mode, run in sample["runs"].items()}
            assert set(texts) == {"ours/chain", "ours/tree"}
            assert texts["ours/chain"] == texts["ours/tree"]
            for run in sample["runs"].values():
                rounds = [token["round"] for token in run["tokens"]]
                assert rounds == sorted(rounds)
                assert max(rounds) == run["rounds"] - 1
                assert run["tokens"][0]["source"] == "target", "the prefill's token"

    def test_it_is_kept(self, evaluation: dict[str, Any], walked_run: RunFolder) -> None:
        assert walked_run.read("evaluation-ours") == json.loads(json.dumps(evaluation))

    def test_the_shown_prompts_take_turns(self) -> None:
        kinds = ["a", "a", "a", "b", "c", "c"]
        questions = [Prompt(str(i), kind, None, "") for i, kind in enumerate(kinds)]  # type: ignore[arg-type]
        assert steps._shown(questions, 4) == [0, 3, 4, 1]
        assert steps._shown(questions, 99) == [0, 3, 4, 1, 5, 2]
        assert steps._shown(questions, 0) == []

    def test_a_character_of_several_tokens_is_one_piece(self, target: Target) -> None:
        tokens = target.tokenizer.encode("a 漢 b", add_special_tokens=False)
        generation = Generation(tokens=tokens, rounds=[len(tokens) - 1], drafted=[len(tokens) - 2])
        marked = steps._marked(target, generation)
        assert "".join(token["text"] for token in marked["tokens"]) == "a 漢 b"
        assert not any("\ufffd" in token["text"] for token in marked["tokens"])
        assert len(marked["tokens"]) < len(tokens)
        assert marked["rounds"] == 2

    def test_wall_clock(self, walked_run: RunFolder) -> None:
        clock = walked_run.read("wall-clock")
        assert clock is not None
        assert (clock["threads"], clock["batch"], list(clock["modes"])) == (1, 1, ["autoregressive", "chain", "tree"])
        assert len({mode["tokens"] for mode in clock["modes"].values()}) == 1
        assert clock["modes"]["chain"]["target_passes"] <= clock["modes"]["autoregressive"]["target_passes"]


class TestRefusals:
    def changed(self, run: RunFolder, **update: Any) -> RunFolder:
        return RunFolder(run.path, run.settings.model_copy(update=update))

    def test_check_fit_wants_a_template(self, walked_run: RunFolder, target: Target) -> None:
        steps.check_fit(walked_run, target)
        bare = Target(target.model, None)
        bare.tokenizer = dataclasses.make_dataclass("Bare", [("chat_template", str), ("name_or_path", str)])("", "mine")
        with pytest.raises(CorpusError, match=r"mine: the tokenizer has no chat template; give one"):
            steps.check_fit(walked_run, bare)

    def test_check_fit_wants_a_drafter_that_fits(self, walked_run: RunFolder, target: Target) -> None:
        shape = walked_run.settings.drafter.model_copy(update={"target_layer_ids": (1, 4)})
        with pytest.raises(DrafterError, match=r"drafter: target_layer_ids \[4\] are out of range"):
            steps.check_fit(self.changed(walked_run, drafter=shape), target)

    def test_a_target_that_is_to_be_trained_first(self, walked_run: RunFolder) -> None:
        settings = walked_run.settings.target.model_copy(update={"from_scratch": True})
        with pytest.raises(ConfigError, match=r"the target has not been trained yet; train it first"):
            steps.load_target(self.changed(walked_run, target=settings))

    def test_an_unknown_recipe(self, walked_run: RunFolder, target: Target) -> None:
        with pytest.raises(ConfigError, match=r"train: there is no recipe 'mine'; use one of baseline, ours"):
            steps.train_drafter(walked_run, target, "mine", Silent())

    def test_states_of_other_layers_are_not_trained_on(self, walked_run: RunFolder, target: Target) -> None:
        shape = walked_run.settings.drafter.model_copy(update={"target_layer_ids": (0, 1)})
        with pytest.raises(
            DrafterError, match=r"the hidden states have layer_ids \[0, 2\], the drafter wants \[0, 1\]"
        ):
            steps.train_drafter(self.changed(walked_run, drafter=shape), target, "ours", Silent())


@pytest.mark.parametrize(
    ("device", "environment", "expected"),
    [
        ("cuda", {"LOCAL_RANK": "1"}, "cuda:1"),
        ("cuda", {}, "cuda"),
        ("cuda:3", {"LOCAL_RANK": "1"}, "cuda:3"),
        ("cpu", {"LOCAL_RANK": "1"}, "cpu"),
    ],
)
def test_every_rank_of_a_host_has_a_gpu_of_its_own(device: str, environment: dict[str, str], expected: str) -> None:
    assert steps.own_device(device, environment) == expected
