"""`drafthouse serve …` as its own application."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from drafthouse.errors import DrafthouseError
from drafthouse.serve.cli import app
from drafthouse.serve.facts import read_facts, write_facts
from drafthouse.serve.launch import launch_line
from tests.doubles.openai_server import Behaviour, OpenAiDouble, openai_double
from tests.unit.serve import clean
from tests.unit.serve.clean import CPU, MTP, PROFILES

GROUP: Any = typer.main.get_command(app)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROFILES.parents[1])


@pytest.fixture
def server() -> Iterator[OpenAiDouble]:
    questions = clean.profile(CPU).canary.questions
    answers = {question.prompt.splitlines()[-1]: question.answers[0] for question in questions}
    with openai_double(Behaviour(model="embedded", answers=answers)) as double:
        yield double


def serve(*words: str | Path, code: int = 0) -> str:
    """Standard output of one verb."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done.stdout


def refused(*words: str | Path) -> str:
    """The sentence of a verb that refuses."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(done.exception, DrafthouseError), done.exception
    assert done.stdout == ""
    return str(done.exception)


class TestHelp:
    @pytest.mark.parametrize("verb", GROUP.commands)
    def test_examples_are_commands_that_exist(self, verb: str) -> None:
        lines = [line.strip() for line in (GROUP.commands[verb].help or "").splitlines()]
        examples = [line for line in lines if line.startswith("drafthouse serve ")]
        assert any(f"serve {verb} " in line for line in examples)
        for line in examples:
            words = shlex.split(line)[3:]
            assert GROUP.commands[verb].make_context(verb, words).params["name"] == MTP or "dflash" in line

    def test_every_verb_has_json(self) -> None:
        assert sorted(GROUP.commands) == ["canary", "check", "plan", "sweep"]
        for command in GROUP.commands.values():
            assert any("--json" in parameter.opts for parameter in command.params)


class TestPlan:
    def test_shell(self) -> None:
        line = launch_line(clean.profile(MTP))
        assert serve("plan", MTP) == f"env CUDA_DEVICE_ORDER=PCI_BUS_ID {shlex.join(line.argv)}\n"

    def test_json(self) -> None:
        found = json.loads(serve("plan", MTP, "--json"))
        assert found["argv"] == list(launch_line(clean.profile(MTP)).argv)
        assert found["env"] == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        assert found["digest"] == clean.profile(MTP).digest()
        assert sorted(found["forms"]) == ["container", "shell", "systemd"]

    @pytest.mark.parametrize(("form", "begins"), [("systemd", "[Unit]\n"), ("container", "docker run --detach")])
    def test_forms(self, form: str, begins: str) -> None:
        assert serve("plan", MTP, "--as", form).startswith(begins)

    def test_what_was_translated_is_said(self) -> None:
        said = serve("plan", MTP, "--set", "environment.SGLANG_ENABLE_SPEC_V2='1'")
        assert said.startswith("# SGLANG_ENABLE_SPEC_V2: dropped; ")

    def test_a_profile_without_a_container(self) -> None:
        assert "no container section" in refused("plan", CPU, "--as", "container")
        assert "container" not in json.loads(serve("plan", CPU, "--json"))["forms"]

    def test_refused(self) -> None:
        assert "did you mean" in refused("plan", MTP[:-1])
        assert "cuda-graph-max-bs-decode" in refused("plan", MTP, "--set", "engine.extra_args.cuda-graph-max-bs=8")


class TestCheck:
    @pytest.fixture
    def node(self, tmp_path: Path) -> Path:
        write_facts(clean.facts(clean.profile(MTP)), tmp_path / "node.json")
        return tmp_path / "node.json"

    def test_facts_of_another_machine(self, node: Path) -> None:
        found = json.loads(serve("check", MTP, "--facts", node, "--json"))
        assert found["errors"] == 0
        assert found["memory"]["effective"] == 8
        assert {finding["severity"] for finding in found["findings"]} == {"warning", "note"}

    def test_an_error_is_exit_code_1(self, node: Path) -> None:
        said = serve("check", MTP, "--facts", node, "--set", "context_length=300000", code=1)
        assert said.startswith("error   context-too-long: ")
        assert said.endswith("errors, 1 not checked\n")

    def test_profile_and_folders_only(self, tmp_path: Path) -> None:
        saved = tmp_path / "facts.json"
        found = json.loads(serve("check", MTP, "--elsewhere", "--save-facts", saved, "--json"))
        assert found["errors"] == 0
        assert read_facts(saved).host.glibc is None

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        said = serve("check", MTP, "--elsewhere", "--model", tmp_path / "gone", code=1)
        assert "model-unreadable: the model's folder: there is no folder gone" in said

    def test_this_machine(self, tmp_path: Path) -> None:
        saved = tmp_path / "facts.json"
        # The profile names the drafter of the demo, which may have been run here.
        changes = ["--set", "engine.python=no-such-python", "--set", f"speculation.draft.path={tmp_path / 'gone'}"]
        said = serve("check", CPU, "--save-facts", saved, *changes, code=1)
        assert said.startswith("error   drafter-unreadable: the drafter's folder: there is no folder gone")
        assert read_facts(saved).model is not None, "the embedded model is here"

    def test_refused(self, tmp_path: Path) -> None:
        assert "no such file of facts" in refused("check", MTP, "--facts", tmp_path / "gone.json")


class TestCanary:
    def test_alive(self, server: OpenAiDouble) -> None:
        said = serve("canary", CPU, "--url", server.url)
        assert said.endswith(f"{server.url}: the canary lives\n")
        assert "passed  acceptance: acceptance length 2.50" in said

    def test_json(self, server: OpenAiDouble) -> None:
        found = json.loads(serve("canary", CPU, "--url", server.url, "--json"))
        assert (found["passed"], found["right"], found["acceptance_length"]) == (True, 4, 2.5)

    def test_dead(self, server: OpenAiDouble) -> None:
        server.behaviour.text = "lambda " * 50
        said = serve("canary", CPU, "--url", server.url, code=1)
        assert "FAILED  question-1: degenerate output: " in said
        assert said.endswith("the canary is dead\n")

    def test_the_profile_s_own_address(self, server: OpenAiDouble) -> None:
        port = server.url.rpartition(":")[2]
        assert "the canary lives" in serve("canary", CPU, "--set", f"port={port}")

    def test_refused(self) -> None:
        assert "write it as http://HOST:PORT" in refused("canary", CPU, "--url", "127.0.0.1")
