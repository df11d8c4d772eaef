"""`drafthouse dash` as an operator starts it: in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drafthouse.dash.cli import settings_of
from drafthouse.dash.errors import DashError
from drafthouse.dash.settings import TOKEN
from drafthouse.errors import ConfigError

NONE = (None,) * 8
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != TOKEN} | {"OMP_NUM_THREADS": "1"}


def verb(*words: str) -> list[str]:
    return [sys.executable, "-m", "drafthouse.cli", *words]


def said(folder: Path, *words: str) -> tuple[int, str, str]:
    done = subprocess.run(verb(*words), cwd=folder, env=ENVIRONMENT, text=True, capture_output=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@contextmanager
def started(folder: Path, *words: str, **more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The running verb and the URL that it printed."""
    process = subprocess.Popen(
        verb(*words),
        cwd=folder,
        env=ENVIRONMENT | more,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        url = re.match(r"(http://\S+/) \(", line)
        assert url is not None, (line, process.stderr.read() if process.stderr and process.poll() else "")
        yield process, url[1]
    finally:
        process.kill()
        process.communicate()


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_told_to_end(tmp_path: Path, number: signal.Signals) -> None:
    run, store = tmp_path / "run", str(tmp_path / "store")
    run.mkdir()
    (tmp_path / "store").mkdir()
    dead = "qwen=http://127.0.0.1:9"
    words = ("dash", "--run", str(run), "--store", store, "--server", dead, "--port", "0", "--set", "probe_s=0")
    with started(tmp_path, *words) as (process, url):
        assert url.startswith("http://127.0.0.1:")
        status, page = get(url)
        assert (status, "<h1>Overview</h1>" in page) == (200, True)
        assert get(f"{url}healthz") == (200, "ok\n")
        assert get(f"{url}metrics")[0] == 200
        assert get(url, Host="evil.example")[0] == 421
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
        assert (process.returncode, errors) == (0, "")


def test_a_token_is_asked_for_and_never_said(tmp_path: Path) -> None:
    secret = "correct horse battery"
    words = ("dash", "--store", str(tmp_path), "--host", "0.0.0.0", "--port", "0", "--url", "http://dash.example.org")
    with started(tmp_path, *words, **{TOKEN: secret}) as (process, url):
        address = url.replace("0.0.0.0", "127.0.0.1")
        assert "Log in" in get(address)[1]
        assert get(f"{address}metrics")[0] == 401
        assert get(f"{address}metrics", Authorization="Bearer wrong wrong wrong")[0] == 401
        assert get(f"{address}metrics", Authorization=f"Bearer {secret}")[0] == 200
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=120)
        assert secret not in out + errors


def test_once_says_what_is_there(tmp_path: Path) -> None:
    code, out, errors = said(tmp_path, "dash", "--store", str(tmp_path), "--once", "--json")
    assert (code, errors) == (0, "")
    seen = json.loads(out)
    assert [store["up"] for store in seen["stores"]] == [True]
    code, out, _ = said(tmp_path, "dash", "--store", str(tmp_path), "--once")
    assert code == 0
    assert out.startswith("0 nodes, 0 jobs, 0 extractions, 0 trainings, 0 servers, 1 store\n")


def test_what_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, out, errors = said(tmp_path, "dash", "--store", str(tmp_path), "--port", port)
    assert (code, out) == (2, "")
    assert errors == f"error: 127.0.0.1:{port}: the port is in use; give another --port, or --port 0\n"
    code, _, errors = said(tmp_path, "dash", "--store", str(tmp_path), "--host", "0.0.0.0", "--port", "0")
    assert code == 2
    assert errors.startswith("error: 0.0.0.0: others can reach this address")
    assert errors.count("\n") == 1


def test_without_options_it_takes_the_inventory_of_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DashError, match=r"nothing to look at.*give --inventory FOLDER, --run FOLDER"):
        settings_of(*NONE)
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory" / "hosts.yml").write_text("all: {}\n", encoding="utf-8")
    assert settings_of(*NONE).inventory == Path("inventory")
    named = settings_of(None, None, None, ["qwen=http://192.0.2.20:30000"], None, None, None, None)
    assert (named.inventory, named.servers) == (None, {"qwen": "http://192.0.2.20:30000"})


def test_options_become_settings_and_set_wins(tmp_path: Path) -> None:
    found = settings_of(None, [tmp_path], ["a", "b"], None, "::1", 0, "https://x.example", ["port=9", "refresh_s=5"])
    assert (found.runs, found.stores, found.host, found.port) == ((tmp_path,), ("a", "b"), "::1", 9)
    assert (found.url, found.refresh_s, found.loopback) == ("https://x.example", 5.0, True)
    assert settings_of(*NONE[:7], ["stores=[c]"]).stores == ("c",)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"servers": ["qwen"]}, "--server: 'qwen' is not of the form name=http://"),
        ({"servers": ["=http://x"]}, "--server: '=http://x' is not of the form"),
        ({"servers": ["Q W=http://x"]}, "servers"),
        ({"runs": [Path("/nowhere")]}, "--run /nowhere: there is no such folder"),
        ({"inventory": Path("/nowhere")}, "--inventory /nowhere: there is no such folder"),
        ({"inventory": Path("/proc")}, "--inventory /proc: there is no hosts.yml in it"),
        ({"stores": ["a"], "port": 70000}, "'port'"),
        ({"stores": ["a"], "url": "javascript:alert(1)"}, "'url'"),
        ({"stores": ["a"], "overrides": ["colour=red"]}, "unknown key 'colour'"),
    ],
)
def test_wrong_options_name_what_is_wrong(options: dict[str, object], sentence: str) -> None:
    names = ("inventory", "runs", "stores", "servers", "host", "port", "url", "overrides")
    with pytest.raises((DashError, ConfigError), match=re.escape(sentence)):
        settings_of(*(options.get(name) for name in names))  # type: ignore[arg-type]


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from drafthouse.dash import cli

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DashError, match=r"flask.*pip install 'drafthouse\[dash\]'"):
        cli._need("flask")
