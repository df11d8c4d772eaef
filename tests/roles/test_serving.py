"""A profile is judged for a node, and what it serves asked for proofs, through Ansible's connection; one playbook.

The node is this machine, the server a real one on its loopback, `systemctl` and `docker` stand-ins.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.doubles.openai_server import Behaviour, OpenAiDouble, openai_double
from tests.ports import free_port
from tests.roles.runs import ANSIBLE, environment, run

EMBEDDED = ANSIBLE.parent / "src/drafthouse/target/embedded"
DOUBLE = ANSIBLE / "molecule/docker/profiles/double.yml"
#: The unit runs, whatever is asked; the container does not; FFmpeg is installed.
PROGRAMS = {
    "systemctl": "echo ActiveState=active; echo NRestarts=0",
    "docker": "echo false 0",
    "ldconfig": "echo 'libavutil.so.57 (libc6,x86-64) => /usr/lib/libavutil.so.57'",
}


def _profile(folder: Path, name: str, **changes: Any) -> None:
    profile = {**yaml.safe_load(DOUBLE.read_text(encoding="utf-8")), "name": name, **changes}
    (folder / f"{name}.yml").write_text(yaml.safe_dump(profile), encoding="utf-8")


def _model(folder: Path) -> Path:
    """A checkpoint as a node has it: a config with the key that SGLang wants, and its weights."""
    folder.mkdir()
    config = json.loads((EMBEDDED / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "full_attention_interval": 4}), encoding="utf-8")
    shutil.copy(EMBEDDED / "model.safetensors", folder)
    return folder


def _port(double: OpenAiDouble) -> int:
    return int(double.url.rsplit(":", 1)[1])


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Name of a task -> its result."""
    work = tmp_path_factory.mktemp("serving")
    profiles, programs = work / "profiles", work / "programs"
    profiles.mkdir()
    programs.mkdir()
    for name, line in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    well, badly = Behaviour("double", answers={"France": "Paris"}), Behaviour("double", text="lambda " * 30)
    weights = _model(work / "weights")
    plan = {"profiles": str(profiles), "form": "container", "user": "drafthouse", "folder": "/srv/serve"}
    unit = {"profile": "good", "model": str(weights), "form": "systemd"}
    with openai_double(well) as good, openai_double(badly) as bad:
        _profile(profiles, "good", port=_port(good))
        _profile(profiles, "bad", port=_port(bad))
        _profile(profiles, "silent", port=free_port(), health={"start_period_s": 2})
        _profile(profiles, "plain", container=None)
        named = {
            "fits": ("plan", {"profile": "good", "model": str(weights), "secrets": True, "devices": [1]}),
            "overridden": ("plan", {**unit, "overrides": ["port=4711"], "devices": [1, 0]}),
            "too long": ("plan", {"profile": "good", "model": str(weights), "overrides": ["context_length=500000"]}),
            "no folder": ("plan", {"profile": "good", "model": f"{work}/nowhere"}),
            "unknown": ("plan", {"profile": "goood"}),
            "no image": ("plan", {"profile": "plain"}),
            "lives": ("canary", {"profile": "good"}),
            "loops": ("canary", {"profile": "bad"}),
            "silent": ("canary", {"profile": "silent"}),
            "ended": ("canary", {"profile": "silent", "form": "container"}),
        }
        tasks = [
            {
                "name": name,
                f"serving_{action}": {**(plan if action == "plan" else {**plan, "form": "systemd"}), **arguments},
                "register": f"answer_{number}",
                "ignore_errors": True,
            }
            for number, (name, (action, arguments)) in enumerate(named.items())
        ]
        answers = ", ".join(f"answer_{number}" for number in range(len(named)))
        keep = {"ansible.builtin.copy": {"content": f"{{{{ [{answers}] | to_json }}}}", "dest": f"{work}/said.json"}}
        play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": [*tasks, keep]}
        play["vars"] = {"ansible_python_interpreter": sys.executable}
        (work / "play.yml").write_text(yaml.safe_dump([play]), encoding="utf-8")
        done = run(
            *("ansible-playbook", "--inventory=localhost,", str(work / "play.yml")),
            ANSIBLE_ACTION_PLUGINS=str(ANSIBLE / "action_plugins"),
            ANSIBLE_CONFIG=str(ANSIBLE / "ansible.cfg"),
            PATH=f"{programs}:{environment()['PATH']}",
        )
        assert done.rc == 0, done.text
        assert good.requests, "the canary reached the server through the connection"
    return dict(zip(named, json.loads((work / "said.json").read_text(encoding="utf-8")), strict=True))


def test_a_container_is_the_plans_own_with_what_the_host_adds(said: dict[str, dict[str, Any]]) -> None:
    launch = said["fits"]["launch"]
    assert launch["argv"][:6] == ["docker", "run", "--log-driver", "journald", "--log-opt", "tag=drafthouse-serve"]
    assert launch["argv"][6:8] == ["--env-file", "/etc/drafthouse/good.env"]
    assert "sglang.launch_server" in launch["argv"]
    assert launch["image"] == "drafthouse/double:1"


def test_a_unit_is_the_plans_own_and_the_host_has_a_drop_in(said: dict[str, dict[str, Any]]) -> None:
    launch = said["overridden"]["launch"]
    assert "EnvironmentFile=-/etc/drafthouse/good.env" in launch["unit"]
    assert "--port 4711" in launch["unit"]
    assert {"User=drafthouse", "Environment=HOME=/srv/serve", "Environment=CUDA_VISIBLE_DEVICES=1,0"} <= set(
        launch["drop_in"].splitlines()
    )


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("too long", ["[profile-refused] profile good: context-too-long: ", "nothing was written"]),
        ("no folder", ["[profile-refused] profile good: model-unreadable: ", "/nowhere cannot be read on the node"]),
        ("unknown", ["there is no profile of that name; did you mean 'good'?"]),
        ("no image", ["profile plain: there is no container section"]),
        ("loops", ["[canary-dead] profile bad: ", "question-1: degenerate output"]),
        ("silent", ["[never-healthy] profile silent: the server was not healthy within 2 s: ConnectionRefusedError"]),
        ("ended", ["[ended-at-start] profile silent: the server ended before it answered"]),
    ],
)
def test_refusals_say_why(said: dict[str, dict[str, Any]], task: str, words: list[str]) -> None:
    assert said[task]["failed"]
    for text in words:
        assert text in said[task]["msg"]


def test_what_nobody_could_check_is_said(said: dict[str, dict[str, Any]]) -> None:
    assert any("SGLang's own argument resolver" in sentence for sentence in said["fits"]["unknown"])


def test_a_model_that_gives_its_proofs_passes(said: dict[str, dict[str, Any]]) -> None:
    assert not said["lives"]["failed"]
    assert not said["lives"]["changed"]
    names = [check["name"] for check in said["lives"]["canary"]["checks"]]
    assert {"question-1", "known-answers", "json-schema", "resumed-prefix"} <= set(names)
