"""The images, built and run: training on the small target, workers side by side, what is in them and what is not."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from drafthouse.drafter import load_drafter
from tests.containers.images import BUILD_S, PREFIX, ROOT, Built, built, docker, image
from tests.loop_run import RUN_FILE, SHARDS
from tests.patience import until
from tests.unit.images.dockerfiles import pins, program

__all__ = ["built"]
pytestmark = [pytest.mark.images, pytest.mark.timeout(BUILD_S)]
# An id that no image knows, as `--user "$(id -u):0"` gives it.
STRANGER = 4711


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the host that the stranger owns, with a small run file."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "small.yml").write_text(RUN_FILE)
    for path in (folder, folder / "small.yml"):
        os.chown(path, STRANGER, STRANGER)
    return folder


def words(name: str, runs: Path, *options: str) -> list[str]:
    return [
        "run",
        "--network",
        "none",
        "--user",
        f"{STRANGER}:0",
        "--volume",
        f"{runs}:/srv/runs",
        *options,
        image(name),
    ]


def run(name: str, runs: Path, *command: str, **environment: str) -> dict[str, object]:
    options = ["--rm", *(word for key, value in environment.items() for word in ("--env", f"{key}={value}"))]
    done = docker(*words(name, runs, *options), *command, "--json")
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def extracted(built: Built, runs: Path) -> Path:
    """A run whose states two workers of one container have extracted."""
    run("extract", runs, "corpus", "build", "--file", "runs/small.yml", "--out", "runs/small")
    run("extract", runs, "corpus", "answer", "--out", "runs/small")
    run("extract", runs, "corpus", "seal", "--out", "runs/small")
    extract = ["states", "extract", "--out", "runs/small"]
    done = docker(*words("extract", runs, "--rm", "--env", "CUDA_VISIBLE_DEVICES=0,1"), *extract)
    shares = [int(number) for number in re.findall(r": (\d+) shards, \d+ tokens", done.stdout)]
    assert len(shares) == 2, done.stdout
    assert sum(shares) == SHARDS
    return runs


def test_workers_of_a_container_leave_nothing_undone(extracted: Path) -> None:
    status = run("extract", extracted, "states", "status", "--out", "runs/small")
    assert status["counts"] == {"done": SHARDS}


def test_the_training_image_trains_on_the_small_target(extracted: Path) -> None:
    result = run("train", extracted, "drafter", "train", "ours", "--out", "runs/small")
    assert result["stopped"] == "finished"
    folder = extracted / "small/drafters/ours/drafter"
    assert load_drafter(folder).config.block_size == 4
    assert folder.stat().st_uid == STRANGER


def test_the_whole_loop_in_one_command(built: Built, runs: Path) -> None:
    run("train", runs, "demo", "--file", "runs/small.yml", "--out", "runs/whole")
    report = json.loads((runs / "whole/report.json").read_text())
    assert report["verdict"]
    assert (runs / "whole/report.html").stat().st_size > 10_000


def test_a_stopped_container_ends_at_once_and_the_next_one_goes_on(extracted: Path) -> None:
    name = f"{PREFIX}-stopped"
    train = ["drafter", "train", "baseline", "--out", "runs/small", "--set", "train.baseline.checkpoint_every=1"]
    docker(*words("train", extracted, "--detach", "--name", name), *train)
    try:
        checkpoints = extracted / "small/drafters/baseline/checkpoints"
        until(lambda: list(checkpoints.glob("*/manifest.json")), "a checkpoint", 300)
        docker("stop", "--time", "60", name)
        state = json.loads(docker("inspect", name).stdout)[0]["State"]
        assert state["ExitCode"] != 137, "killed: the signal did not reach the trainer"
    finally:
        docker("rm", "--force", name)
    result = run("train", extracted, *train[:5])
    assert result["stopped"] == "finished"
    assert result["resumed_from"]


@pytest.mark.parametrize("name", ["base", "extract", "train"])
def test_what_an_image_says_of_itself(built: Built, name: str) -> None:
    config = json.loads(docker("image", "inspect", image(name)).stdout)[0]["Config"]
    assert config["User"] == "2000:0"
    assert config["Entrypoint"][0] == "/usr/bin/tini"
    labels = {key.removeprefix("org.opencontainers.image."): value for key, value in config["Labels"].items()}
    assert labels["title"] == f"drafthouse/{name}"
    assert labels["revision"] == "0123abc"
    assert labels["base.name"] == (built.python_image if name == "base" else image("base"))


def test_packages_are_the_pinned_ones(built: Built) -> None:
    listed = docker("run", "--rm", "--entrypoint", "pip", image("base"), "list", "--format", "freeze").stdout
    found = dict(line.split("==") for line in listed.lower().replace("_", "-").split())
    lines = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()
    wanted = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    ours = {"pip", "setuptools", "drafthouse"}
    assert found.keys() - ours <= wanted.keys()
    assert {name: version.partition("+")[0] for name, version in found.items() if name not in ours} == {
        name: wanted[name] for name in found if name not in ours
    }


def test_no_secret_is_in_a_layer(built: Built, tmp_path: Path) -> None:
    archive = tmp_path / "image.tar"
    docker("save", "--output", str(archive), image("extract"))
    subprocess.run(["tar", "-xf", str(archive), "-C", str(tmp_path)], check=True)
    archive.unlink()
    text = "No program or no driver"  # in the entrypoint: what is looked for can be found

    def holders(wanted: str) -> list[str]:
        # zgrep's -z reads layers that are compressed as well as those that are not.
        files = [str(path) for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
        return [file for file in files if subprocess.run(["zgrep", "-qaF", wanted, file], check=False).returncode == 0]

    assert holders(text)
    assert holders(built.marker) == []


def test_stages_of_the_serving_image_that_need_no_gpu(built: Built) -> None:
    built.build("serve", "--target", "system", "--arg", f"CUDA_IMAGE={built.python_image}")
    name = image("serve", variant="")
    refused = docker("run", "--rm", name, check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: no model is named")
    libraries = docker("run", "--rm", name, "ldconfig", "-p").stdout
    releases = [int(number) for number in re.findall(r"libavutil\.so\.(\d+)", libraries)]
    assert releases
    assert all(56 <= release <= 60 for release in releases), "torchcodec loads FFmpeg 4 to 8"
    for command in ("ffmpeg -version", "ninja --version", "c++ --version", "python3 -m venv --help"):
        docker("run", "--rm", name, *command.split())
    docker("run", "--rm", "--user", f"{STRANGER}:0", name, "touch", "/home/drafthouse/.cache/flashinfer/kernel")


def resolved(constraints: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What SGLang needs for the Python and the C library of its image, under versions that are given."""
    (folder / "asked.txt").write_text(f"sglang=={pins()['sglang']}\nflash-attn-4>=4.0.0b18\n", encoding="utf-8")
    (folder / "constraints.txt").write_text(constraints, encoding="utf-8")
    done = subprocess.run(
        [
            *(program("uv", "uv"), "pip", "compile", "asked.txt", "--constraint", "constraints.txt", "--no-config"),
            *("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_34", "--only-binary", ":all:"),
            *("--prerelease", "if-necessary-or-explicit", "--no-annotate", "--no-header", "--no-cache", "--quiet"),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if re.search(r"Failed to fetch|sglang was not found in the package registry", done.stderr):
        pytest.skip("no package index with SGLang is reached from here")
    return done


def test_the_pins_of_the_serving_image_are_on_the_index_and_all_that_it_needs(tmp_path: Path) -> None:
    done = resolved((ROOT / "images/serve/requirements.txt").read_text(encoding="utf-8"), tmp_path)
    assert done.returncode == 0, done.stderr
    found = dict(line.split("==") for line in done.stdout.split())
    assert found == pins()


def test_a_pin_that_does_not_fit_the_others_is_found(tmp_path: Path) -> None:
    text = (ROOT / "images/serve/requirements.txt").read_text(encoding="utf-8")
    done = resolved(text.replace(f"torchvision=={pins()['torchvision']}", "torchvision==0.29.0"), tmp_path)
    assert done.returncode != 0
    assert "torchvision==0.29.0 depends on torch==2.14.0" in " ".join(done.stderr.split())
