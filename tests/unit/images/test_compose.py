"""The compose files against the schema of Compose, the list of images, and the launch line of the profile."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

from drafthouse.cli import app
from drafthouse.serve.launch import launch_line
from drafthouse.serve.load import load_profile, profile_names
from tests.unit.images.dockerfiles import ROOT, build_script, instructions, program

FILES = sorted((ROOT / "docker").glob("compose.*.yml"))
TAGS = {image.tag for image in build_script().read(environment={}).values()}


def services(name: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker" / name).read_text())["services"]
    return found


def check(*files: Path) -> subprocess.CompletedProcess[str]:
    words = [
        program("check-jsonschema", "check-jsonschema"),
        "--builtin-schema",
        "vendor.compose-spec",
        *map(str, files),
    ]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_files_are_compose_files() -> None:
    done = check(*FILES, ROOT / "docker/images.yml")
    assert done.returncode == 0, done.stdout


def test_a_misspelt_key_is_found(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yml"
    wrong.write_text((ROOT / "docker/compose.serve.yml").read_text().replace("network_mode", "netwerk_mode"))
    assert "netwerk_mode" in check(wrong).stdout


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_images_are_ours_or_pinned_by_digest(file: Path) -> None:
    for service in services(file.name).values():
        image = service["image"]
        assert image in TAGS or re.fullmatch(r"[\w./-]+:[\w.]+@sha256:[0-9a-f]{64}", image), image


@pytest.mark.parametrize("file", [file for file in FILES if "serve" not in file.name], ids=lambda file: file.name)
def test_commands_are_verbs_with_their_options(file: Path) -> None:
    root = typer.main.get_command(app)
    for name, service in services(file.name).items():
        if name == "store":
            continue
        words, command = shlex.split(service["command"]), root
        context = click.Context(root)
        while hasattr(command, "get_command"):
            command = command.get_command(context, words.pop(0))
            assert command is not None, service["command"]
        command.make_context(name, words)


def test_the_served_line_is_the_profile_s() -> None:
    (model,) = services("compose.serve.yml").values()
    profile = load_profile("qwen3.6-27b-mtp-a6000x2")
    line = launch_line(profile)
    assert tuple(shlex.split(model["command"])) == line.argv[line.argv.index("sglang.launch_server") + 1 :]
    assert model["environment"] == line.env
    (device,) = model["deploy"]["resources"]["reservations"]["devices"]
    assert device["count"] == profile.hardware.gpus


def test_the_served_container_is_the_profile_s() -> None:
    """Whichever of the two starts it, it is one image, and what the other has compiled is found."""
    file = yaml.safe_load((ROOT / "docker/compose.serve.yml").read_text())
    (model,) = file["services"].values()
    container = load_profile("qwen3.6-27b-mtp-a6000x2").container
    assert container is not None
    assert model["image"] == container.image
    kept = dict(volume.split(":") for volume in model["volumes"])
    assert {file["volumes"][name]["name"]: inside for name, inside in kept.items()} == container.volumes


def test_a_profile_of_our_image_keeps_what_its_user_may_write() -> None:
    made = " ".join(one.value for one in instructions("serve") if one.word == "RUN").split()
    found = [load_profile(name).container for name in profile_names(ROOT / "inventory/profiles")]
    ours = [container for container in found if container is not None and container.image.startswith("drafthouse/")]
    assert len(ours) == 2
    for container in ours:
        assert container.image in TAGS
        assert set(container.volumes.values()) <= set(made)


def test_what_is_kept_is_a_folder_that_the_image_gives_to_its_user() -> None:
    made = " ".join(one.value for name in ("base", "serve") for one in instructions(name) if one.word == "RUN")
    for file in FILES:
        for name, service in services(file.name).items():
            inside = [volume.rpartition(":")[2] for volume in service.get("volumes", ())]
            assert name == "store" or all(path in made.split() for path in inside), inside


@pytest.mark.parametrize("name", ["compose.extract.yml", "compose.train.yml"])
def test_keys_of_the_store_have_no_default(name: str) -> None:
    for service in services(name).values():
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            assert service["environment"][key].startswith(f"${{{key}:?"), service


def test_a_step_waits_for_the_one_before() -> None:
    found = services("compose.extract.yml")
    chain, name = [], "extract"
    while name:
        chain.append(name)
        name = next(iter(found[name].get("depends_on", {})), "")
    assert chain == ["extract", "seal", "answer", "corpus", "store"]
