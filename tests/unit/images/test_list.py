"""docker/images.yml and the script that builds from it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from drafthouse import __version__
from tests.unit.images.dockerfiles import NAMES, ROOT, build_script

build = build_script()
IMAGES = build.read(environment={})


def test_list_and_folders_agree() -> None:
    assert {image.dockerfile.parent.name for image in IMAGES.values()} == set(NAMES)
    for name, image in IMAGES.items():
        folder, _, variant = name.partition("-")
        assert image.dockerfile == ROOT / "images" / folder / "Dockerfile"
        assert image.tag == f"drafthouse/{folder}:{__version__}" + (f"-{variant}" if variant else "")


@pytest.mark.parametrize("name", IMAGES)
def test_every_argument_of_the_list_is_one_of_the_dockerfile(name: str) -> None:
    assert set(IMAGES[name].args) <= IMAGES[name].declared


@pytest.mark.parametrize("name", [name for name in IMAGES if "BASE_IMAGE" in IMAGES[name].args])
def test_an_image_stands_on_the_one_that_it_names(name: str) -> None:
    (below,) = IMAGES[name].needs
    assert IMAGES[name].args["BASE_IMAGE"] == IMAGES[below].tag


def test_what_is_below_is_built_before_and_once() -> None:
    order = [image.name for image in build.in_order(IMAGES, ["train-cpu", "extract-cpu"])]
    assert order == ["base-cpu", "train-cpu", "extract-cpu"]


def test_secrets_are_passed_as_files_only_when_given(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.crt"
    bundle.write_text("x")
    image = build.read(environment={"CA_BUNDLE": str(bundle)})["base-cpu"]
    words = image.command("docker", {})
    assert [words[i + 1] for i, word in enumerate(words) if word == "--secret"] == [f"id=ca_bundle,src={bundle}"]
    assert "--secret" not in IMAGES["base-cpu"].command("docker", {})


def test_arguments_of_the_caller_win_where_a_dockerfile_has_them() -> None:
    words = IMAGES["train-cpu"].command("docker", {"BASE_IMAGE": "mine:1", "TORCH_INDEX": ""}, "stage")
    assert "BASE_IMAGE=mine:1" in words
    assert "TORCH_INDEX=" not in words
    assert words[words.index("--target") + 1] == "stage"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nothing"], "there is no image 'nothing'"),
        (["serve", "--arg", "NOPE=1"], "has an argument 'NOPE'"),
        (["serve", "--arg", "NOPE"], "--arg 'NOPE' has no value"),
    ],
)
def test_wrong_input_is_one_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(SystemExit) as caught:
        build.main([*words, "--dry-run"])
    assert str(caught.value).startswith("error: ")
    assert sentence in str(caught.value)


def test_a_secret_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no such file; correct CA_BUNDLE"):
        build.read(environment={"CA_BUNDLE": str(tmp_path / "no.crt")})


def test_a_client_without_buildkit_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"new": "#!/bin/sh\necho 'buildx component is missing' >&2; exit 1\n", "old": "#!/bin/sh\necho --secret\n"}
    for folder, text in texts.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "docker").write_text(text)
        (tmp_path / folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'new'}:{tmp_path / 'old'}")
    assert build.buildkit_client() == str(tmp_path / "old/docker")
    monkeypatch.setenv("PATH", str(tmp_path / "new"))
    with pytest.raises(SystemExit, match="no docker on PATH builds with BuildKit"):
        build.buildkit_client()


def test_a_build_that_fails_ends_with_its_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docker").write_text('#!/bin/sh\n[ "$2" = --help ] && echo --secret && exit 0\nexit 1\n')
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SystemExit, match=r"drafthouse/base:.*-cpu could not be built"):
        build.main(["train-cpu"])


def test_wheels_stay_out_of_the_repository() -> None:
    asked = ["git", "-C", str(ROOT), "check-ignore", "docker/wheels/torch-1-py3-none-any.whl"]
    assert subprocess.run(asked, capture_output=True, check=False).returncode == 0
