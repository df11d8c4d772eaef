"""The images, built and run: training on the small target, workers side by side, what is in them and what is not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from drafthouse.drafter import load_drafter
from tests.containers.images import PREFIX, ROOT, Built, built, docker, image
from tests.loop_run import RUN_FILE, SHARDS
from tests.unit.images.dockerfiles import pins

__all__ = ["built"]
pytestmark = pytest.mark.images
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
    assert status["counts"] == {"committed": SHARDS}


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
        began = time.monotonic()
        while not list(checkpoints.glob("*/manifest.json")) and time.monotonic() - began < 120:
            time.sleep(0.05)
        began = time.monotonic()
        docker("stop", "--time", "60", name)
        assert time.monotonic() - began < 30
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
    for program in ("ffmpeg -version", "ninja --version", "c++ --version", "python3 -m venv --help"):
        docker("run", "--rm", name, *program.split())
    docker("run", "--rm", "--user", f"{STRANGER}:0", name, "touch", "/home/drafthouse/.cache/flashinfer/kernel")


def test_the_pins_of_the_serving_image_are_on_the_index_and_satisfy_each_other() -> None:
    wanted = pins()
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(34, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--no-deps"),
            "--ignore-requires-python",  # judged by the interpreter that runs pip
            *("--only-binary", ":all:", "--python-version", "3.12", "--implementation", "cp", "--target", "none"),
            *(word for platform in platforms for word in ("--platform", platform)),
            *("--report", "-", "--requirement", str(ROOT / "images/serve/requirements.txt")),
        ],
        # A machine's own constraints are not the image's.
        env={**os.environ, "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        check=False,
        timeout=840,
    )
    if "No matching distribution found for sglang" in done.stderr:
        pytest.skip("the package index of this machine has no SGLang")
    assert done.returncode == 0, done.stderr[-2000:]
    chosen = {canonicalize_name(one["metadata"]["name"]): one["metadata"] for one in json.loads(done.stdout)["install"]}
    assert {name: metadata["version"] for name, metadata in chosen.items()} == wanted
    # pip reads markers for the interpreter that runs it; the image has Python 3.12.
    python = {"python_version": "3.12", "python_full_version": "3.12.3", "platform_machine": "x86_64"}
    for name, metadata in chosen.items():
        for line in metadata.get("requires_dist", ()):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({**python, "extra": ""}):
                version = wanted.get(canonicalize_name(requirement.name))
                assert version is not None, f"{name} wants {line}"
                assert requirement.specifier.contains(version, prereleases=True), f"{name} wants {line}"
