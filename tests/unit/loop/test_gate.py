"""The export gate: it lets through what is right, and nothing that is shifted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafthouse.corpus import prompts
from drafthouse.corpus.records import Prompt
from drafthouse.decode.draft import DraftContext
from drafthouse.drafter import DFlashDrafter, DrafterConfig, load_drafter
from drafthouse.errors import DrafterError
from drafthouse.loop.export import export
from drafthouse.loop.folder import RunFolder
from drafthouse.loop.gate import ByHeart, by_heart, parity
from drafthouse.loop.steps import drafter_config
from drafthouse.progress import Silent
from drafthouse.target import Target
from tests.command_line import drafthouse, files_of


@pytest.fixture(scope="module")
def config(walked_run: RunFolder, target: Target) -> DrafterConfig:
    return drafter_config(walked_run, target)


@pytest.fixture(scope="module")
def question(walked_run: RunFolder, target: Target) -> Prompt:
    """A held-out prompt with a long answer."""
    return max(prompts(walked_run.settings.corpus, target.tokenizer), key=lambda prompt: len(prompt.reference))


@pytest.fixture(scope="module")
def text(question: Prompt, target: Target) -> list[int]:
    return [*question.input_ids.tolist(), *target.tokenizer(question.reference).input_ids]


def test_both_passes_agree_for_weights_that_nobody_trained(
    target: Target, config: DrafterConfig, text: list[int]
) -> None:
    drafter = DFlashDrafter(config, seed=3).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(4)  # sharp enough that a wrong context shows
    found = parity(target, drafter, text)
    assert found.passed
    assert found.blocks == 12
    assert found.agreement == 1.0


def test_a_context_that_is_off_by_one_is_refused(
    target: Target, config: DrafterConfig, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = DFlashDrafter(config, seed=3).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(4)
    extend = DraftContext.extend

    def late(self: DraftContext, taps: Tensor, path: Tensor, counts: Tensor, width: int | None = None) -> None:
        extend(self, taps, (path + 1).clamp_max(taps.shape[1] - 1), counts, width)

    monkeypatch.setattr(DraftContext, "extend", late)
    assert not parity(target, drafter, text).passed


def test_one_text_by_heart_is_accepted_in_whole_blocks(target: Target, config: DrafterConfig, question: Prompt) -> None:
    found = by_heart(target, config, question, steps=80)
    assert found.passed, found
    assert set(found.rounds[:-1]) == {config.block_size}


def test_what_was_learned_of_shifted_layers_is_not_accepted(
    target: Target, config: DrafterConfig, question: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = Target.capture

    def shifted(self: Target, ids: Tensor, lengths: Tensor, layers: Sequence[int], **rest: Any) -> Tensor:
        return capture(self, ids, lengths, [layer + 1 for layer in layers], **rest)

    monkeypatch.setattr(Target, "capture", shifted)
    found = by_heart(target, config, question, steps=80)
    assert not found.passed, found


def test_a_short_answer_shows_nothing(target: Target, config: DrafterConfig, question: Prompt) -> None:
    wide = config.model_copy(update={"block_size": 64})
    with pytest.raises(DrafterError, match="two blocks have 128"):
        by_heart(target, wide, question, steps=1)


@pytest.mark.parametrize(
    ("rounds", "passed"), [((4, 4, 4, 1), True), ((4, 3, 4, 4), False), ((4,), False), ((), False)]
)
def test_every_pass_but_the_last_must_be_whole(rounds: tuple[int, ...], passed: bool) -> None:
    assert ByHeart(rounds, block_size=4, steps=1, loss=0.0).passed is passed


class TestExport:
    def test_what_is_written_is_what_was_judged(self, walked_run: RunFolder, target: Target, tmp_path: Path) -> None:
        found = export(walked_run, target, "ours", tmp_path / "engine", steps=0, progress=Silent())
        drafter = load_drafter(found.folder, target_identity=target.identity)
        assert found.tensors == 11 * drafter.config.num_hidden_layers + 3
        assert all(one.passed for one in found.parity)
        stored = load_file(found.folder / "model.safetensors")
        assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}

    def test_a_drafter_that_fails_leaves_nothing(self, walked_run: RunFolder, target: Target, tmp_path: Path) -> None:
        with pytest.raises(DrafterError, match="did not learn one text by heart in 1 steps"):
            export(walked_run, target, "ours", tmp_path / "engine", steps=1, progress=Silent())
        assert list(tmp_path.iterdir()) == []

    def test_another_shape_than_the_run_files_is_refused(
        self, walked_run: RunFolder, target: Target, tmp_path: Path
    ) -> None:
        shape = walked_run.settings.drafter.model_copy(update={"block_size": 6})
        other = RunFolder(walked_run.path, walked_run.settings.model_copy(update={"drafter": shape}))
        with pytest.raises(DrafterError, match=r"block_size: \S+ 6|block_size"):
            export(other, target, "ours", tmp_path / "engine", steps=0, progress=Silent())

    def test_what_is_no_drafter_is_never_replaced(self, run: Path, tmp_path: Path) -> None:
        file, folder = tmp_path / "notes.txt", tmp_path / "models"
        file.write_text("mine")
        (folder / "other").mkdir(parents=True)
        before = files_of(tmp_path)
        for to, words in ((file, "this is a file"), (folder, "this folder holds 'other'")):
            outcome = drafthouse("export", "ours", str(to), "--out", str(run), "--gate-steps", "0")
            assert outcome.code == 2
            assert f"{words}, and a drafter replaces what lies there" in outcome.err
        assert files_of(tmp_path) == before

    def test_on_the_command_line(self, run: Path, tmp_path: Path) -> None:
        to = tmp_path / "engine"
        outcome = drafthouse("export", "ours", str(to), "--out", str(run), "--gate-steps", "0", "--json")
        assert outcome.code == 0, outcome
        assert sorted(files_of(to)) == ["config.json", "model.safetensors"]
        again = drafthouse("export", "ours", str(to), "--out", str(run), "--gate-steps", "0", "--json")
        assert again.code == 0, "an earlier export is replaced"
        wrong = drafthouse("export", "ours", str(to), "--out", str(run), "--dtype", "int8")
        assert wrong.code == 2
        assert "'int8' is no element type for weights" in wrong.err
