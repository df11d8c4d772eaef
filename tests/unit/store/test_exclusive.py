from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from drafthouse.errors import ConfigError, DrafthouseError
from drafthouse.store.exclusive import exclusive

HOLD = """
import sys, time
from pathlib import Path
from drafthouse.store.exclusive import exclusive
with exclusive(Path(sys.argv[1]), "sleeps"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_one_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    folder = tmp_path / "a/b"
    with (
        exclusive(folder, "works"),
        pytest.raises(ConfigError, match=r"a/b: another process trains in this folder; wait for it, or stop it first"),
        exclusive(folder, "trains"),
    ):
        pass
    with exclusive(folder, "works"):
        assert list(folder.iterdir()) == [], "the lock is no file"


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, env=dict(os.environ))
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="another process works"), exclusive(tmp_path, "works"):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    with exclusive(tmp_path, "works"):
        pass


def test_an_error_inside_lets_go(tmp_path: Path) -> None:
    with pytest.raises(KeyError), exclusive(tmp_path, "works"):
        raise KeyError
    with exclusive(tmp_path, "works"):
        pass


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DrafthouseError, match="file") as caught, exclusive(tmp_path / "file", "works"):
        pass
    assert "\n" not in str(caught.value)
