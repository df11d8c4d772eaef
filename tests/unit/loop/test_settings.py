from __future__ import annotations

from typing import Any

import pytest
import yaml

from drafthouse.config import load, validate
from drafthouse.errors import ConfigError
from drafthouse.loop.settings import DEMO_RUN_FILE, RunSettings
from drafthouse.loop.tiny import EMBEDDED_RECIPE, TargetSettings, embedded_target
from tests.loop_run import RUN_FILE

SMALL: dict[str, Any] = yaml.safe_load(RUN_FILE)


def changed(path: str, value: Any) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(RUN_FILE)
    node = values
    *parts, last = path.split(".")
    for part in parts:
        node = node.setdefault(part, {})
    node[last] = value
    return values


def test_the_packaged_files_are_valid() -> None:
    demo = load(RunSettings, DEMO_RUN_FILE)
    assert demo.workers == 2, "one is killed, one goes on"
    assert demo.probe.seed != demo.corpus.seed, "nothing is tuned on the held-out prompts of the evaluation"
    assert demo.train["baseline"].steps == demo.train["ours"].steps, "the same tokens for both recipes"
    assert load(TargetSettings, EMBEDDED_RECIPE).training.steps > 0
    assert (embedded_target() / "model.safetensors").is_file()


def test_both_demo_recipes_see_the_same_batches() -> None:
    baseline, ours = (load(RunSettings, DEMO_RUN_FILE).train[name].model_dump() for name in ("baseline", "ours"))
    differing = {key for key in baseline if baseline[key] != ours[key]}
    assert differing <= {"loss", "noise", "optimizer", "schedule"}


def test_settings_survive_their_own_file() -> None:
    settings = validate(RunSettings, SMALL, "here")
    again = validate(RunSettings, yaml.safe_load(yaml.safe_dump(settings.model_dump(mode="json"))), "here")
    assert (again, again.digest()) == (settings, settings.digest())


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("evaluate.budget", 2, r"evaluate.budget 2 cannot hold the spine of drafter.block_size 4; use at least 3"),
        ("extract.layer_ids", [0, 1], r"extract.layer_ids \[0, 1\] are not the drafter.target_layer_ids \[0, 2\]"),
        ("answers.max_new_tokens", 900, r"extract.max_tokens 1024 would cut answers: .* make up to 1060"),
        ("train", {"ours": {}}, r"train lacks the recipe 'baseline', which reports compare"),
        ("name", "Two Words", r"'name': string should match pattern"),
        ("train.Mine", {}, r"'train.Mine.\[key\]': string should match pattern"),
        ("train.a/b", {}, r"'train.a/b.\[key\]': string should match pattern"),
        ("workers", 0, r"'workers': should be greater than or equal to 1"),
        ("threads", 0, r"'threads': should be greater than or equal to 1"),
        ("corpus.sources", [], r"'corpus.sources': tuple should have at least 1 item"),
        ("answers.temperature", -1, r"'answers.temperature': should be greater than or equal to 0"),
    ],
)
def test_impossible(path: str, value: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        validate(RunSettings, changed(path, value), "here")


def test_layer_ids_may_be_said_twice_when_they_agree() -> None:
    assert validate(RunSettings, changed("extract.layer_ids", [0, 2]), "here").extract.layer_ids == (0, 2)


def test_more_recipes_may_be_named() -> None:
    assert set(validate(RunSettings, changed("train.no-noise", {"steps": 3}), "here").train) == {
        "baseline",
        "ours",
        "no-noise",
    }
