"""Images of the project, built with the engine of this machine on a Debian that needs no hub."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.containers.debian import bootstrap, why_not

ROOT = Path(__file__).resolve().parents[2]
PREFIX = f"drafthouse-test-{os.getpid()}"
PACKAGES = "python3,python3-venv,ca-certificates"
# A limit for a machine that has other work as well; on two free cores all builds together take three minutes.
BUILD_S = 2_400
PARTS = ("LICENSE", "README.md", "constraints.txt", "docker", "images", "pyproject.toml", "src")


@dataclass(frozen=True)
class Built:
    """A copy of the checkout whose images are named for this session.

    Attributes:
        folder: the copy.
        python_image: a Debian with Python, in place of the pinned images of the hub.
        marker: a text that was in both secrets of every build.
    """

    folder: Path
    python_image: str
    marker: str

    def build(self, *words: str, **environment: str) -> None:
        """Run docker/build.py; the test fails with its last lines when it does."""
        secrets = {name: str(self.folder / f"{name}.secret") for name in ("CA_BUNDLE", "PIP_CONF")}
        done = subprocess.run(
            [sys.executable, str(self.folder / "docker/build.py"), *words],
            env={**os.environ, **secrets, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=BUILD_S,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def image(name: str, variant: str = "-cpu") -> str:
    """Tag of an image as this session builds it."""
    return f"{PREFIX}/{name}:0.1.0{variant}"


def docker(*words: str, timeout_s: int = 900, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the Docker client."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False, timeout=timeout_s)
    assert not check or done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done


def _python_image(archive: Path) -> str:
    bootstrap(PACKAGES, archive)
    name = f"{PREFIX}/python:0.1.0"
    docker("import", str(archive), name)
    archive.unlink()
    return name


def _secrets(folder: Path, marker: str, environment: Mapping[str, str]) -> None:
    """Both secrets of a build: the certificates that this machine's pip uses, and an empty configuration."""
    bundle = next((environment[name] for name in ("PIP_CERT", "SSL_CERT_FILE") if environment.get(name)), None)
    certificates = Path(bundle or "/etc/ssl/certs/ca-certificates.crt").read_text(encoding="utf-8")
    (folder / "CA_BUNDLE.secret").write_text(f"{certificates}\n# {marker}\n", encoding="utf-8")
    (folder / "PIP_CONF.secret").write_text(f"# {marker}\n[global]\n", encoding="utf-8")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """The CPU variants of base, extract and train."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("checkout")
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "*.whl"))
        else:
            shutil.copy(source, folder / part)
    names = folder / "docker/images.yml"
    names.write_text(names.read_text().replace("drafthouse/", f"{PREFIX}/"))
    marker = f"marker-of-{PREFIX}"
    _secrets(folder, marker, os.environ)
    # A PyTorch for CPUs that lies on this machine spares its download.
    wheels = list(Path(os.environ.get("PIP_FIND_LINKS", "none")).glob("torch-*+cpu-*.whl"))
    for wheel in wheels:
        shutil.copy(wheel, folder / "docker/wheels")
    try:
        made = Built(folder, _python_image(folder / "python.tar"), marker)
        args = ["--arg", f"PYTHON_IMAGE={made.python_image}", *(["--arg", "TORCH_INDEX="] if wheels else [])]
        made.build("extract-cpu", "train-cpu", *args, REVISION="0123abc")
        yield made
    finally:
        tags = docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()
        docker("image", "rm", "--force", *(tag for tag in tags if tag.startswith(f"{PREFIX}/")), check=False)
