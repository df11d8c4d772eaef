"""The command line as a whole: help that cannot rot, `--json`, exit codes, and small verbs."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer

from drafthouse import __version__, cli
from drafthouse.loop.tiny import embedded_target
from tests.command_line import drafthouse, files_of
from tests.loop_run import RUN_FILE, SHARDS, Walked

ROOT: Any = typer.main.get_command(cli.app)
TORCHRUN = re.compile(r"torchrun (--[a-z-]+(=\S+)? )+-m drafthouse\.cli ")


def commands(command: Any = ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every group and verb with the words that lead to it."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


VERBS = [path for path, command in commands() if not hasattr(command, "commands")]
EVERYTHING = [path for path, _ in commands()]


def examples(path: tuple[str, ...]) -> list[str]:
    """Lines of the help that are commands."""
    help_text = next(command.help for found, command in commands() if found == path) or ""
    return [line.strip() for line in help_text.splitlines() if line.strip().startswith(("drafthouse ", "torchrun "))]


def parse(line: str) -> dict[str, Any]:
    """What the verb of a command line would be called with; ValueError when it would be refused."""
    given: dict[str, Any] = {}
    said = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stderr(said))
        for path, command in commands():
            if path in VERBS:
                stack.enter_context(mock.patch.object(command, "callback", lambda **values: given.update(values)))
        with pytest.raises(SystemExit) as end:
            ROOT.main(args=shlex.split(line)[1:], prog_name="drafthouse")
    if end.value.code:
        raise ValueError(said.getvalue())
    return given


def word(path: tuple[str, ...]) -> str:
    return " ".join(path) or "(top)"


class TestHelp:
    @pytest.mark.parametrize("path", EVERYTHING, ids=word)
    def test_it_has_an_example(self, path: tuple[str, ...]) -> None:
        shown = drafthouse(*path, "--help")
        assert (shown.code, shown.err) == (0, "")
        mine = [line for line in examples(path) if path == () or " ".join(path) in line]
        assert mine, "an example of this very command"
        assert all(line.split()[0] in shown.out for line in mine)

    @pytest.mark.parametrize("line", sorted({line for path in EVERYTHING for line in examples(path)}))
    def test_every_example_is_a_command_that_exists(self, line: str) -> None:
        plain = TORCHRUN.sub("drafthouse ", line).removesuffix(" &")
        assert plain.startswith("drafthouse "), "torchrun starts the module"
        parse(plain)

    @pytest.mark.parametrize(
        "line",
        [line for path in EVERYTHING for line in examples(path) if "--set" in line and "train-tiny" not in line],
    )
    def test_settings_in_examples_exist(self, line: str, tmp_path: Path) -> None:
        from drafthouse.loop.folder import RunFolder

        RunFolder.begin(tmp_path / "new", None, parse(line)["overrides"])

    def test_settings_of_the_training_example_exist(self) -> None:
        from drafthouse.config import load
        from drafthouse.loop.tiny import EMBEDDED_RECIPE, TargetSettings

        for line in examples(("target", "train-tiny")):
            load(TargetSettings, EMBEDDED_RECIPE, parse(line)["overrides"])

    def test_a_rotten_example_would_be_found(self) -> None:
        for line in ("corpus bild", "corpus build --outt x", "store probe", "drafter train a b", "demo --resume=1"):
            with pytest.raises(ValueError):
                parse(f"drafthouse {line}")


class TestUsage:
    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("frobnicate", "No such command 'frobnicate'"),
            ("corpus frobnicate", "No such command 'frobnicate'"),
            ("--frobnicate", "No such option"),
            ("states status --frobnicate", "No such option"),
            ("drafter train", "Missing argument"),
            ("store probe", "Missing argument"),
        ],
    )
    def test_exit_code_2_and_nothing_on_standard_output(self, line: str, said: str) -> None:
        outcome = drafthouse(*line.split())
        assert (outcome.code, outcome.out) == (2, "")
        assert said in outcome.err

    @pytest.mark.parametrize("path", [(), *(path for path in EVERYTHING if path and path not in VERBS)], ids=word)
    def test_a_group_alone_shows_its_help(self, path: tuple[str, ...]) -> None:
        outcome = drafthouse(*path)
        assert outcome.code == 2
        assert "Commands" in outcome.out + outcome.err

    @pytest.mark.parametrize("path", VERBS, ids=word)
    def test_every_verb_has_json(self, path: tuple[str, ...]) -> None:
        command = next(command for found, command in commands() if found == path)
        assert any("--json" in parameter.opts for parameter in command.params)


def test_the_door_loads_no_heavy_library() -> None:
    """They would read their environment variables before `main` has set them, and every verb would wait for them."""
    code = "import sys, drafthouse.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "drafthouse.corpus.cli" in loaded
    assert not {"torch", "transformers", "tokenizers", "pyarrow", "flask", "fabric"} & set(loaded)


class TestJson:
    """`result` of an outcome parses all of standard output as one object, and wants standard error empty."""

    def test_every_verb_of_the_loop(self, walked: Walked) -> None:
        found = walked.results
        assert found["build"]["samples"] == 48
        assert found["answer"] == {"committed": SHARDS}
        assert found["seal"]["samples"] == 48
        assert (found["extract"]["shards"], found["extract"]["worker"]) == (SHARDS, "only")
        assert found["status"]["counts"] == {"done": SHARDS}
        assert {state["worker"] for state in found["status"]["shards"].values()} == {"only"}
        assert (found["ours"]["steps"], found["ours"]["stopped"]) == (12, "finished")
        assert sorted(found["evaluate"]) == ["baseline", "ours"]
        assert Path(found["report"]["page"]).is_file()

    def test_small_verbs(self, walked: Walked, tmp_path: Path) -> None:
        assert drafthouse("version", "--json").result == {"version": __version__}
        shown = drafthouse("target", "show", "--json").result
        assert (shown["layers"], shown["hidden_size"]) == (4, 128)
        assert shown["layer_types"] == {"full_attention": 1, "linear_attention": 3}
        checked = drafthouse(
            "drafter", "check", walked.path / "drafters/ours/drafter", "--target", "embedded", "--json"
        )
        assert checked.result["config"]["target_identity"] == shown["identity"]
        assert checked.result["parameters"] > 0
        url = drafthouse("store", "probe", tmp_path / "store", "--json").result["url"]
        assert url == f"file://{tmp_path}/store"


class TestText:
    def test_a_path_is_neither_wrapped_nor_taken_for_markup(self, walked: Walked, tmp_path: Path) -> None:
        folder = tmp_path / "[bold]" / ("long" * 30)
        folder.parent.mkdir()
        folder.symlink_to(walked.path / "drafters/ours/drafter")
        assert drafthouse("drafter", "check", folder).out == f"{folder}: whole; 1 layers, block 4, taps [0, 2]\n"

    def test_status(self, walked: Walked) -> None:
        assert drafthouse("states", "status", "--out", walked.path).out == f"{SHARDS} shards: {SHARDS} done\n"

    def test_target(self) -> None:
        assert re.search(r"^layers +4$", drafthouse("target", "show", embedded_target()).out, re.MULTILINE)

    def test_a_reason_of_several_lines_becomes_one(self, tmp_path: Path) -> None:
        (tmp_path / "run.yml").write_text("a: [1\nb: 2\n", encoding="utf-8")
        assert "not valid YAML" in drafthouse("states", "status", "--out", tmp_path).sentence


class TestProbe:
    def test_a_folder_is_left_as_it_was(self, tmp_path: Path) -> None:
        outcome = drafthouse("store", "probe", tmp_path)
        assert (outcome.code, outcome.out) == (0, f"file://{tmp_path}: create-only puts are honoured\n")
        assert files_of(tmp_path) == {}

    @pytest.mark.parametrize(
        ("url", "sentence"),
        [
            ("", "the store's URL is empty"),
            ("ftp://host/x", "ftp://host/x: the scheme 'ftp:' is not known; use "),
            ("s3://bucket/x", "s3://bucket/x: there are no S3 credentials in the environment; set AWS_ACCESS_KEY_ID"),
            ("s3://key:secret@bucket/x", "s3://…/x: credentials do not belong in a URL; set AWS_ACCESS_KEY_ID"),
        ],
    )
    def test_what_is_no_store(self, url: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name, raising=False)
        assert drafthouse("store", "probe", url).sentence.startswith(sentence)

    def test_a_server_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        said = drafthouse("store", "probe", "s3://bucket/x?endpoint=ftp://127.0.0.1").sentence
        assert "the endpoint 'ftp://127.0.0.1' is not an address" in said


class TestWrongNames:
    """Names that a user mistypes, beside the ten errors of test_user_errors.py."""

    @pytest.mark.parametrize(
        "verb", ["states status", "states extract", "corpus seal", "corpus answer", "report", "evaluate"]
    )
    def test_no_run(self, verb: str, tmp_path: Path) -> None:
        said = drafthouse(*verb.split(), "--out", tmp_path / "typo").sentence
        assert said == (
            f"{tmp_path}/typo: there is no run here; check --out, or begin one with `drafthouse demo` or"
            " `drafthouse corpus build`"
        )
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("words", [("drafter", "train", "mine"), ("evaluate", "--drafter", "mine")])
    def test_no_recipe(self, words: tuple[str, ...], walked: Walked) -> None:
        said = drafthouse(*words, "--out", walked.path).sentence
        assert said == "train: there is no recipe 'mine'; use one of baseline, ours"

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("target", "show", "{}/none"), "{}/none: no config.json here; give a model folder"),
            (("drafter", "check", "{}/none"), "{}/none/config.json: there is no drafter here; check the path"),
            (("demo", "--out", "{}/file"), "{}/file: this is a file, and a run is a folder; choose another --out"),
            (("corpus", "build", "--out", "{}/file"), "{}/file: this is a file, and a run is a folder; "),
            (("corpus", "build", "--out", "{}/file/x"), "{}/file/x: the folder cannot be made (Not a directory); "),
            (("target", "train-tiny", "{}/file"), "{}/file: this is no trained small target and would be replaced; "),
            (("target", "train-tiny", "{}/t", "--set", "device=abacus"), "target.device: 'abacus' is no device; "),
            (("demo", "--out", "{}/new", "--set", "target.device=abacus"), "target.device: 'abacus' is no device; "),
            (("demo", "--out", "{}/new", "--set", "target.path=/none"), "/none: no config.json here; "),
        ],
    )
    def test_no_such_thing(self, words: tuple[str, ...], said: str, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine", encoding="utf-8")
        found = drafthouse(*(one.format(tmp_path) for one in words)).sentence
        assert found.startswith(said.format(tmp_path))
        assert [path.name for path in tmp_path.iterdir()] == ["file"]

    def test_steps_in_the_wrong_order(self, tmp_path: Path) -> None:
        file, run = tmp_path / "small.yml", tmp_path / "run"
        file.write_text(RUN_FILE, encoding="utf-8")
        build = drafthouse(
            "corpus", "build", "--out", run, "--file", file, "--set", "corpus.samples=8", "--json"
        ).result
        assert build["samples"] == 8
        before = files_of(run)
        fixes = {
            ("corpus", "seal"): "run the answering workers until they end",
            ("states", "extract"): "run `drafthouse corpus answer`, then `drafthouse corpus seal`",
            ("states", "status"): "run `drafthouse corpus answer`, then `drafthouse corpus seal`",
            ("drafter", "train", "ours"): "extract it first",
            ("evaluate",): "run `drafthouse drafter train baseline`",
            ("report",): "run `drafthouse evaluate` first",
        }
        for words, fix in fixes.items():
            assert drafthouse(*words, "--out", run, "--json").sentence.endswith(f"; {fix}")
        assert files_of(run) == before

    def test_a_damaged_result(self, run: Path) -> None:
        (run / "evaluation-ours.json").write_text('{"prompts": 4, ', encoding="utf-8")
        said = drafthouse("report", "--out", run).sentence
        assert said == f"{run}/evaluation-ours.json: this result is damaged; delete it and run its step again"
        assert json.loads((run / "report.json").read_text(encoding="utf-8"))["greedy_identical"] is True
