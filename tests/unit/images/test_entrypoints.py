"""The entrypoints, run by a shell with test doubles for the programs that they start."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.unit.images.dockerfiles import ROOT

WORKER = """#!/bin/sh
echo "gpu=${CUDA_VISIBLE_DEVICES:-none} $*"
[ "${CUDA_VISIBLE_DEVICES:-}" != broken ] || exit 3
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder of programs, before the system's own on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def double(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def run(name: str, programs: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": f"{programs}:{os.defpath}", "PORT": "30000", **environment}
    entrypoint = str(ROOT / "images" / name / "entrypoint")
    return subprocess.run([entrypoint, *words], env=env, capture_output=True, text=True, check=False, timeout=30)


class TestExtract:
    @pytest.mark.parametrize("verb", ["states extract", "corpus answer"])
    def test_one_worker_for_each_gpu_that_may_be_used(self, programs: Path, verb: str) -> None:
        double(programs, "drafthouse", WORKER)
        done = run("extract", programs, *verb.split(), "--out", "a b", CUDA_VISIBLE_DEVICES="2,3")
        assert done.returncode == 0
        assert sorted(done.stdout.splitlines()) == [f"gpu=2 {verb} --out a b", f"gpu=3 {verb} --out a b"]

    def test_all_gpus_of_the_container(self, programs: Path) -> None:
        double(programs, "drafthouse", WORKER)
        double(programs, "nvidia-smi", "#!/bin/sh\nprintf 'GPU-a\\nGPU-b\\n'\n")
        done = run("extract", programs, "states", "extract")
        assert sorted(done.stdout.splitlines()) == ["gpu=GPU-a states extract", "gpu=GPU-b states extract"]

    def test_without_a_gpu_one_worker(self, programs: Path) -> None:
        double(programs, "drafthouse", WORKER)
        double(programs, "nvidia-smi", "#!/bin/sh\nexit 9\n")
        assert run("extract", programs, "states", "extract").stdout == "gpu=none states extract\n"

    def test_a_worker_that_fails_is_told_and_the_others_finish(self, programs: Path) -> None:
        double(programs, "drafthouse", WORKER)
        done = run("extract", programs, "states", "extract", CUDA_VISIBLE_DEVICES="broken,1")
        assert done.returncode == 3
        assert "gpu=1 states extract" in done.stdout

    def test_other_verbs_run_once(self, programs: Path) -> None:
        double(programs, "drafthouse", WORKER)
        done = run("extract", programs, "corpus", "seal", CUDA_VISIBLE_DEVICES="0,1")
        assert done.stdout == "gpu=0,1 corpus seal\n"


class TestServe:
    def test_options_go_to_the_engine_after_its_address(self, programs: Path) -> None:
        double(programs, "python3", '#!/bin/sh\necho "$*"\n')
        done = run("serve", programs, "--model-path", "m", "--port", "8000", PORT="30001")
        assert done.stdout == "-m sglang.launch_server --host 0.0.0.0 --port 30001 --model-path m --port 8000\n"

    def test_other_programs_of_the_image(self, programs: Path) -> None:
        assert run("serve", programs, "echo", "here").stdout == "here\n"

    def test_no_model_is_one_sentence(self, programs: Path) -> None:
        done = run("serve", programs)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("error: no model is named; give")
        assert done.stderr.count("\n") == 1
