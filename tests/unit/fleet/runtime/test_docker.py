"""What the engine is told, and the script that containers begin with, under the shells that images have."""

from __future__ import annotations

import csv
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthouse.fleet.runtime.docker import BOX, ENTER, options
from drafthouse.fleet.runtime.images import names
from drafthouse.fleet.runtime.protocol import FENCED, Launch

SHELLS = [words for words in (["dash"], ["bash", "--posix"], ["busybox", "sh"]) if shutil.which(words[0])]
SECRET = "a 'b' \"c\" $(touch x) `id` \\ \n second"


@pytest.fixture(params=SHELLS, ids=lambda words: words[0])
def enter(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The words that run the script under a shell; its folder is the test's."""
    (tmp_path / "enter").write_text(ENTER.replace(BOX, str(tmp_path)))
    (tmp_path / "secrets").write_text(f"export TOKEN={shlex.quote(SECRET)}\n")
    return [*request.param, str(tmp_path / "enter")]


def run(enter: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*enter, *words], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("mode", ["exec", "never"])
def test_the_command_has_the_secrets_and_its_words_as_they_are(enter: list[str], mode: str) -> None:
    words = ["$(touch x)", "a b", "", "*", "new\nline"]
    assert run(enter, mode, "printenv", "TOKEN").stdout == f"{SECRET}\n"
    assert run(enter, mode, "printf", "%s|", *words).stdout == "".join(f"{word}|" for word in words)


@pytest.mark.parametrize(
    ("policy", "exit", "told"),
    [
        ("on-failure", 3, 3),
        ("on-failure", 0, 0),
        ("on-failure", FENCED, 0),
        ("always", 0, 1),
        ("always", FENCED, 0),
        ("never", 127, 127),
    ],
)
def test_the_engine_restarts_what_it_should(
    enter: list[str], policy: str, exit: int, told: int, tmp_path: Path
) -> None:
    assert run(enter, policy, "sh", "-c", f"exit {exit}").returncode == told
    assert (tmp_path / "exit").read_text() == f"{exit}\n", "what it was in truth"


@pytest.mark.parametrize("policy", ["on-failure", "always"])
def test_what_was_fenced_off_below_a_launcher_is_not_started_again(
    enter: list[str], policy: str, tmp_path: Path
) -> None:
    assert run(enter, policy, "sh", "-c", "echo over >$DRAFTHOUSE_FENCED; exit 1").returncode == 0
    assert (tmp_path / "exit").read_text() == f"{FENCED}\n"
    assert run(enter, policy, "sh", "-c", "exit 1").returncode == 1, "a word of an earlier start does not count"


def test_sigterm_is_passed_on_and_the_commands_own_status_is_kept(enter: list[str], tmp_path: Path) -> None:
    (tmp_path / "exit").write_text("stale")
    script = "trap 'echo bye; sleep 0.2; exit 7' TERM; echo up; while :; do sleep 0.05; done"
    with subprocess.Popen([*enter, "never", "sh", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert not (tmp_path / "exit").exists()
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "bye\n"
        assert process.wait(240) == 7
    assert (tmp_path / "exit").read_text() == "7\n"


def launch(**changes: Any) -> Launch:
    return Launch(job="a", epoch=3, argv=("true",), image="sha256:0", **changes)


def chosen(start: str, **changes: Any) -> list[str]:
    return [word for word in options(launch(**changes), "/srv/jobs/a", "/srv/box") if word.startswith(start)]


@pytest.mark.parametrize(
    ("changes", "policy"),
    [
        ({"restart": "never"}, "no"),
        ({"restart": "on-failure", "retries": 0}, "no"),
        ({"restart": "on-failure", "retries": 5}, "on-failure:5"),
        ({"restart": "always", "retries": 5}, "on-failure"),
    ],
)
def test_restart_policy(changes: dict[str, Any], policy: str) -> None:
    assert chosen("--restart", **changes) == [f"--restart={policy}"]


def test_gpus_by_number_or_by_name_or_none() -> None:
    assert chosen("--gpus", gpus=2) == ["--gpus=2"]
    assert chosen("--gpus", gpus=("0", "GPU-1")) == ['--gpus="device=0,GPU-1"'], "quotes for the client's CSV reader"
    assert chosen("--gpus") == []
    assert "--env=NVIDIA_VISIBLE_DEVICES=void" in chosen("--env")
    assert "--env=NVIDIA_VISIBLE_DEVICES=void" not in chosen("--env", gpus=1)


def test_secrets_are_in_no_option() -> None:
    words = options(launch(secrets={"TOKEN": "hush-4711"}, env={"OPEN": "a\nb"}), "/srv/jobs/a", "/srv/box")
    assert "hush-4711" not in str(words)
    assert "--env=OPEN=a\nb" in words


@given(st.text("ab,\"'=: $", min_size=1, max_size=8))
def test_a_mount_is_read_as_it_was_meant(name: str) -> None:
    (word,) = [one for one in chosen("--mount", mounts={f"/data/{name}": "/m:ro"}) if "/data/" in one]
    fields = next(csv.reader([word.removeprefix("--mount=")]))
    assert fields == ["type=bind", f"source=/data/{name}", "target=/m", "readonly"]


def test_shared_memory_and_labels() -> None:
    assert chosen("--ipc") == ["--ipc=host"]
    assert chosen("--shm-size", shm_gib=1.5) == ["--shm-size=1610612736"]
    assert chosen("--label", labels={"kind": "train", "job": "forged"}) == [
        "--label=drafthouse.kind=train",
        "--label=drafthouse.job=a",
        "--label=drafthouse.epoch=3",
    ]


def test_an_image_is_looked_for_as_pulled_and_as_carried() -> None:
    digest = "0" * 64
    assert names(f"sha256:{digest}") == [f"sha256:{digest}"]
    assert names(f"host:5000/a/b:1@sha256:{digest}") == [
        f"host:5000/a/b:1@sha256:{digest}",
        f"drafthouse-carried:{digest}",
    ]
