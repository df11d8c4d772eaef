"""What workers that were killed had asked a server for does not stay; what living ones wait for does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from drafthouse.errors import StatesError
from drafthouse.plugins.sglang_states import ours
from drafthouse.states.asking import asking
from drafthouse.states.settings import EngineSettings
from drafthouse.states.vllm import VllmTaps
from drafthouse.target import Target
from tests.doubles.vllm_states import Behaviour, vllm_server
from tests.patience import until

LAYERS, FROM_ONE = (0, 2), (1, 3, 4)
IDS, LENGTHS = torch.randint(4, 900, (3, 12), generator=torch.Generator().manual_seed(1)), torch.tensor([12, 5, 9])
HOLDS = """
import sys, time
from pathlib import Path
from drafthouse.states.asking import asking
with asking(Path(sys.argv[1]), 600) as new_name:
    print(new_name(), flush=True)
    sys.stdin.read()
"""
CAPTURES = """
import sys
from pathlib import Path
from types import SimpleNamespace
import torch
from drafthouse.states.settings import EngineSettings
from drafthouse.states.vllm import VllmTaps
url, storage, layers, hidden = sys.argv[1:]
target = SimpleNamespace(identity="x", num_layers=int(layers), hidden_size=int(hidden))
taps = VllmTaps(target, EngineSettings(kind="vllm", url=url, storage=Path(storage)), (0, 2))
taps.capture(torch.randint(4, 900, (3, 12)), torch.tensor([12, 5, 9]), (0, 2))
"""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def start(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """A process that waits for what it has asked for, and the id of its request."""
    words = [sys.executable, "-c", HOLDS, str(folder)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_files_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    dead, of_the_dead = start(tmp_path)
    living, of_the_living = start(tmp_path)
    assert ours(of_the_dead), "the plug-in of SGLang knows them by it"
    files = [f"cmpl-{of_the_dead}-0-1a2b.safetensors", f"cmpl-{of_the_dead}-0-1a2b.safetensors.lock"]
    files += [f"{of_the_dead}.0.safetensors", f"{of_the_dead}.5.part"]
    kept = [f"cmpl-{of_the_living}-0-1a2b.safetensors", f"{of_the_living}.0.part", "model.safetensors", "drafthouse-1"]
    for name in (*files, *kept):
        (tmp_path / name).write_bytes(b"states")
    try:
        with asking(tmp_path, 600) as new_name:
            assert names(tmp_path) >= {*files, *kept}, "both live"
            assert new_name() != new_name()
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        with asking(tmp_path, 600):
            left = {name for name in names(tmp_path) if not name.endswith(".worker")}
            assert left == {*kept, files[-1]}, "a server may be about to rename it"
        os.utime(tmp_path / files[-1], (0, 0))
        with asking(tmp_path, 600):
            pass
        living.communicate("")
        assert names(tmp_path) == set(kept), "who ends takes his own mark with him"
    finally:
        for process in (dead, living):
            process.kill()
            process.wait()


def test_many_begin_and_end_at_once(tmp_path: Path) -> None:
    """Each sweeps while others make their marks: nobody may lose his own."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(60):
                with asking(tmp_path, 600) as new_name:
                    file = tmp_path / f"{new_name()}.0.safetensors"
                    file.touch()
                    time.sleep(0.001)
                    file.unlink()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failed == []
    assert names(tmp_path) == set()


def test_a_folder_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(StatesError, match="file: the server's folder cannot be written to"),
        asking(tmp_path / "file", 600),
    ):
        pass


def test_a_worker_that_is_killed_while_a_server_works_for_it(
    embedded: Target, described: Target, tmp_path: Path
) -> None:
    held = threading.Event()
    behaviour = Behaviour(embedded, tmp_path / "shared", FROM_ONE, held=held)
    behaviour.storage.mkdir()
    with vllm_server(behaviour) as url:
        words = [url, str(behaviour.storage), str(embedded.num_layers), str(embedded.hidden_size)]
        worker = subprocess.Popen([sys.executable, "-c", CAPTURES, *words])
        until(lambda: behaviour.requests == 3, "its requests")
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        held.set()
        until(lambda: len(list(behaviour.storage.glob("*.safetensors"))) == 3, "the files")
        settings = EngineSettings.model_validate({"kind": "vllm", "url": url, "storage": behaviour.storage})
        VllmTaps(described, settings, LAYERS).capture(IDS, LENGTHS, LAYERS)
    assert names(behaviour.storage) == set()
