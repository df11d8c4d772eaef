"""vLLM's CPU build, started by our own profile's launch line with a drafter that was trained and exported here.

`make engine` makes the two environments; `ENGINE_PYTHON` and `LOAD_PROGRAM` name others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from drafthouse.serve.launch import launch_line
from drafthouse.serve.load import load_profile
from drafthouse.serve.profile import Profile
from tests.command_line import drafthouse
from tests.patience import until
from tests.ports import free_port

REPOSITORY = Path(__file__).parents[2]
PROFILE = "embedded-dflash-cpu"
# About a minute on two free cores.
START_S = 1_200

# The demo's recipe at a size that trains within a minute; blocks of 4 so that few steps already pay.
RUN_FILE = """\
name: served
corpus:
  samples: 384
  samples_per_shard: 48
  heldout: 2
  max_tokens: 160
  sources:
    - {type: grammar, kind: lookup}
    - {type: grammar, kind: repeat}
answers: {rows: 24, max_new_tokens: 48}
extract: {rows: 8, max_tokens: 1024, batch_tokens: 2048}
drafter:
  num_hidden_layers: 1
  num_attention_heads: 2
  num_key_value_heads: 1
  head_dim: 32
  block_size: 4
  target_layer_ids: [0, 1, 2]
train:
  baseline: {steps: 1, rows: 1, anchors: 1, log_every: 1, checkpoint_every: 1, evaluate_every: 1}
  ours:
    steps: 240
    rows: 8
    anchors: 16
    optimizer: {kind: muon, lr: 0.002, muon_lr: 0.005}
    log_every: 80
    checkpoint_every: 240
    evaluate_every: 240
    loss: {soft_weight: 0.5, weights: streak}
probe: {prompts: 1}
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(START_S + 900))


@pytest.fixture(scope="session", autouse=True)
def bytecode() -> Iterator[None]:
    """Packages were installed uncompiled: unless the first process keeps what it compiles, all others do so again."""
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        yield


@dataclass(frozen=True)
class Served:
    """A running server: its profile, its address, and the overrides that made the profile."""

    profile: Profile
    url: str
    overrides: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """The profile for a verb of `drafthouse serve`."""
        return [PROFILE, *(word for override in self.overrides for word in ("--set", override))]


def _installed(variable: str, folder: str, program: str) -> Path:
    """A program that `make engine` has installed, or the one that a variable names; else the tests are skipped."""
    path = Path(os.environ.get(variable, REPOSITORY / folder / "bin" / program))
    if not path.exists():
        reason = REPOSITORY / folder / "why-not"
        said = reason.read_text(encoding="utf-8").strip() if reason.is_file() else "make engine installs it"
        pytest.skip(f"there is no {folder}/bin/{program}: {said}")
    return path


@pytest.fixture(scope="session")
def engine_python() -> str:
    return str(_installed("ENGINE_PYTHON", ".venv-engine", "python"))


@pytest.fixture(scope="session")
def load_program() -> Path:
    return _installed("LOAD_PROGRAM", ".venv-load", "aiperf")


@pytest.fixture(scope="session")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that the loop has trained on the target's own answers and exported."""
    folder = tmp_path_factory.mktemp("drafter")
    file, run = folder / "served.yml", folder / "run"
    file.write_text(RUN_FILE, encoding="utf-8")
    for words in (
        ("corpus", "build", "--file", file),
        ("corpus", "answer", "--worker", "only"),
        ("corpus", "seal"),
        ("states", "extract", "--worker", "only"),
        ("drafter", "train", "ours"),
    ):
        assert drafthouse(*words, "--out", run, "--json").code == 0
    return run / "drafters" / "ours" / "drafter"


@pytest.fixture(scope="session")
def overrides(engine_python: str, drafter: Path) -> tuple[str, ...]:
    return (
        f"engine.python={engine_python}",
        f"speculation.draft.path={drafter}",
        "speculation.block_size=4",
        f"port={free_port()}",
    )


@pytest.fixture(scope="session")
def served(overrides: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The server, ended with all of its processes after the last test."""
    profile = load_profile(PROFILE, overrides)
    line = launch_line(profile)
    log = tmp_path_factory.mktemp("engine") / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(line.argv),
            env={**os.environ, **line.env},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait(process, profile.address + profile.health.path, log)
        yield Served(profile, profile.address, overrides)
    finally:
        _end(process)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def answers() -> bool:
        with direct.open(url, timeout=5):
            return True

    try:
        until(answers, "the engine", START_S, every=1, unless=lambda: process.poll() is not None and "it has ended")
    except AssertionError as error:
        pytest.fail(f"{error}\n{log.read_text(encoding='utf-8', errors='replace')[-4000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
