"""A node over ssh, against real sshds: what it does, and what each way of failing is called."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from drafthouse.errors import FleetError
from drafthouse.fleet.connection import NodeConnection
from drafthouse.fleet.errors import AccessError, CommandError, HostKeyError, UnknownOutcomeError, UnreachableError
from drafthouse.fleet.exchange import exchange
from drafthouse.fleet.node import Node as FleetNode
from drafthouse.fleet.trust import scan, trust
from tests.doubles.nodes import Fleet, Node
from tests.doubles.nodes.keys import new_key
from tests.patience import until

EXOTIC = [
    "$(touch /srv/x)", "`touch /srv/x`", "; touch /srv/x", "a'b", 'a"b', "a\\b", "two\nlines", "", " ", "*", "~", "-n",
    "--help", "$HOME", "!!", "é漢\u202e", "\t", "a&b|c>d<e", "#", "{a,b}", "\r", "%s", "\x7f\x01",
]  # fmt: skip


def described(fleet: Fleet, node: Node) -> FleetNode:
    return FleetNode(name=node.name, host=node.address, port=node.port, key_file=fleet.key)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def running(node: Node, *commands: str) -> int:
    """How many processes of the node have a command line that begins so."""
    return sum(line.startswith(commands) for line in node.pids().values())


def to(fleet: Fleet, node: Node) -> NodeConnection:
    return NodeConnection(described(fleet, node), fleet.inventory / "known_hosts")


@pytest.fixture
def connection(fleet: Fleet, node: Node) -> Iterator[NodeConnection]:
    with to(fleet, node) as opened:
        yield opened


def test_a_command_gets_its_words_and_its_input_and_says_what_it_said(connection: NodeConnection) -> None:
    program = "import sys; print(len(sys.stdin.read()), file=sys.stderr); print(repr(sys.argv[1:]), end='')"
    answer = connection.run(["python3", "-c", program, *EXOTIC], input="x" * 3_000_000)
    assert answer.exit == 0
    assert answer.stdout == repr(EXOTIC)
    assert answer.stderr == "3000000\n"
    assert connection.run(["ls", "-A", "/srv/x"], check=False).exit == 2


def test_a_failed_command_is_told_with_its_last_words(connection: NodeConnection) -> None:
    with pytest.raises(CommandError, match=r"node1 .*'ls /nowhere' failed \(2\): .*No such file") as caught:
        connection.run(["ls", "/nowhere"])
    assert caught.value.exit == 2
    assert "No such file" in caught.value.stderr
    assert connection.run(["false"], check=False).exit == 1
    assert connection.run(["sh", "-c", "kill -9 $$"], check=False).exit == 128 + signal.SIGKILL
    with pytest.raises(CommandError, match=r"\(127\).*not-there"):
        connection.run(["not-there"])
    with pytest.raises(FleetError, match="NUL"):
        connection.run(["echo", "a\0b"])


def test_a_command_that_takes_too_long_is_ended_on_the_node(connection: NodeConnection, node: Node) -> None:
    with pytest.raises(CommandError, match=r"took longer than 0\.3 s and was ended"):
        connection.run(["sleep", "987"], timeout_s=0.3)
    until(lambda: running(node, "sleep 987") == 0, "the command's end")


def test_a_child_that_holds_the_output_open_holds_nobody_up(connection: NodeConnection) -> None:
    begin = time.monotonic()
    assert connection.run(["sh", "-c", "sleep 300 & echo started"], timeout_s=600).stdout == "started\n"
    assert time.monotonic() - begin < 150


def test_output_without_end_is_refused(connection: NodeConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafthouse.fleet.connection.MAX_OUTPUT", 1 << 20)
    with pytest.raises(CommandError, match="'cat /dev/zero' wrote more than 1 MiB"):
        connection.run(["cat", "/dev/zero"], timeout_s=30)
    assert connection.run(["echo", "well"]).stdout == "well\n"


@pytest.mark.parametrize("interpreter", ["python3", "sh"])
def test_a_sent_program_has_arguments_and_input_and_stands_nowhere(
    connection: NodeConnection, interpreter: str
) -> None:
    if interpreter == "python3":
        text = "import sys\nprint(sys.argv[1:], sys.stdin.read())\nprint(open('/proc/self/cmdline').read()) # marker"
    else:
        text = "set -eu\nprintf '[%s] ' \"$@\"\ncat\ntr '\\0' ' ' < /proc/$$/cmdline # marker"
    answer = connection.script(text, EXOTIC[:4], interpreter=interpreter, input="the input")  # type: ignore[arg-type]
    expected = repr(EXOTIC[:4]) if interpreter == "python3" else "[$(touch /srv/x)] [`touch /srv/x`] [; touch /srv/x]"
    assert answer.stdout.startswith(expected)
    assert "the input" in answer.stdout
    assert "marker" not in answer.stdout


def test_files_are_written_whole_with_their_mode_and_read_back(connection: NodeConnection, node: Node) -> None:
    content = os.urandom(300_000)
    path = "/srv/new folder/$(touch x)/'quoted'.bin"
    connection.write(path, content)
    assert connection.read(path) == content
    there = node.path(path).stat()
    assert there.st_mode & 0o777 == 0o600
    assert node.path("/srv/new folder").stat().st_mode & 0o777 == 0o700
    connection.write(path, "short", mode=0o755)
    assert connection.read(path) == b"short"
    assert node.path(path).stat().st_mode & 0o777 == 0o755
    assert names(node.path("/srv/new folder/$(touch x)")) == ["'quoted'.bin"]
    assert connection.read("/srv/not there") is None
    with pytest.raises(CommandError, match="/srv"):
        connection.write("/srv", b"over a folder")
    with pytest.raises(CommandError, match="'read /srv' failed"):
        connection.read("/srv")


def test_content_is_in_no_process_list(connection: NodeConnection, node: Node) -> None:
    seen: list[str] = []

    def watched(work: Callable[[], object], *programs: str) -> None:
        """Look at the node's processes while `work` is done, which goes on once each of `programs` was seen."""
        worker = threading.Thread(target=work)

        def shown() -> bool:
            seen.extend(node.pids().values())
            return all(any(program in line for line in seen) for program in programs)

        worker.start()
        until(shown, f"processes called {programs}")
        node.write("/srv/go", b"")
        until(lambda: shown() and not worker.is_alive(), "the end of the work")
        node.execute(["rm", "/srv/go"])

    # The writer stands still in the middle, before its content is under the name.
    node.write(
        "/srv/tools/chmod", b'#!/bin/sh\nuntil [ -e /srv/go ]; do sleep 0.01; done\nexec /bin/chmod "$@"\n', 0o755
    )
    node.write("/root/.bashrc", b"PATH=/srv/tools:$PATH\n")  # bash reads it when sshd starts it
    try:
        watched(lambda: connection.write("/srv/secret", "hush-hush" * 1000), "/srv/secret", "/srv/tools/chmod")
    finally:
        node.execute(["rm", "-r", "/root/.bashrc", "/srv/tools"])
    program = "import os, time\nwhile not os.path.exists('/srv/go'): time.sleep(0.01)  # hush-hush"
    watched(lambda: connection.script(program, ["a-word"]), "a-word")
    assert connection.read("/srv/secret") == b"hush-hush" * 1000
    assert not any("hush-hush" in line for line in seen)


def test_a_full_disk_is_called_so_and_the_old_file_stays(healthy: Fleet) -> None:
    node = healthy.nodes[1]
    with to(healthy, node) as connection:
        connection.write("/srv/file", b"before")
        node.resize("/srv", "1m")
        try:
            with pytest.raises(CommandError, match=r"/srv/file cannot be written: the disk is full; free"):
                connection.write("/srv/file", bytes(2 << 20))
            assert connection.read("/srv/file") == b"before"
            assert names(node.path("/srv")) == ["file"]
        finally:
            node.resize("/srv", healthy.sizes["/srv"])


def test_a_stream_follows_and_ends_its_command_when_it_is_closed(connection: NodeConnection, node: Node) -> None:
    node.write("/srv/log", "first\nsecond é\n".encode())
    lines = connection.stream(["tail", "-n", "+1", "-F", "/srv/log"])
    assert [next(lines), next(lines)] == ["first", "second é"]
    with node.path("/srv/log").open("a") as log:
        log.write("third\n")
    assert next(lines) == "third"
    # One that writes nothing would not even learn that its output is closed; nor would its child.
    silent = connection.stream(["sh", "-c", "echo silent; sleep 4567; true"])
    assert next(silent) == "silent"
    until(lambda: running(node, "tail -n +1", "sleep 4567") == 2, "both to run")
    lines.close()
    silent.close()
    until(lambda: running(node, "tail -n +1", "sleep 4567") == 0, "the end of both")


def test_a_stream_ends_with_its_command(connection: NodeConnection) -> None:
    assert list(connection.stream(["sh", "-c", "echo out; echo err >&2; printf end"])) == ["out", "err", "end"]
    with pytest.raises(CommandError, match=r"failed \(3\): said so"):
        list(connection.stream(["sh", "-c", "echo said so; exit 3"]))


def test_a_port_of_the_node_is_here_while_it_is_needed(connection: NodeConnection, fleet: Fleet, node: Node) -> None:
    with connection.forward(8000) as port:
        with pytest.raises(httpx2.TransportError):  # nobody listens yet
            httpx2.get(f"http://127.0.0.1:{port}/", timeout=5)
        node.write("/srv/www/page", b"hello" * 50_000)
        argv = [sys.executable, "-m", "http.server", "8000", "--bind", "127.0.0.1", "--directory", "/srv/www"]
        enter = ["nsenter", f"--target={node.first()}", "--mount", "--net", "--pid", "--wd=/"]
        server = subprocess.Popen([*enter, *argv], stderr=subprocess.DEVNULL)
        try:
            url = f"http://127.0.0.1:{port}/page"
            page = until(lambda: httpx2.get(url, timeout=5), "the server", unless=lambda: server.poll() is not None)
            assert page.content == b"hello" * 50_000
        finally:
            server.kill()
            server.wait()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")
def test_a_folder_is_copied_under_the_same_host_keys(fleet: Fleet, tmp_path: Path) -> None:
    node, folder = fleet.nodes[2], tmp_path / "to copy"
    (folder / "below it").mkdir(parents=True)
    (folder / "below it/$(touch x)").write_text("one")
    (folder / "run.sh").write_text("two")
    (folder / "run.sh").chmod(0o755)
    connection = to(fleet, node)
    connection.copy_tree(folder, "/srv/deep/a b; touch c")
    assert node.path("/srv/deep/a b; touch c/below it/$(touch x)").read_text() == "one"
    (folder / "run.sh").unlink()
    connection.copy_tree(folder, "/srv/deep/a b; touch c")
    assert names(node.path("/srv/deep/a b; touch c")) == ["below it"]
    with pytest.raises(FleetError, match="no such folder"):
        connection.copy_tree(tmp_path / "nowhere", "/srv/deep")
    stranger = tmp_path / "known hosts"
    stranger.write_text(f"{node.address} {new_key()[1]}\n")
    connection.known_hosts = stranger
    with pytest.raises(HostKeyError):
        connection.copy_tree(folder, "/srv/deep")
    connection.close()


def test_a_program_here_feeds_one_there(fleet: Fleet, node: Node) -> None:
    class Bytes:
        count = 0.0

        def task(self, description: str, total: float | None) -> Bytes:
            return self

        def __enter__(self) -> Bytes:
            return self

        def __exit__(self, *_: object) -> None: ...

        def advance(self, steps: float = 1, note: str | None = None) -> None:
            self.count += steps

    progress = Bytes()
    connection = to(fleet, node)
    said = connection.pipe(["head", "-c", "5000000", "/dev/zero"], ["wc", "-c"], progress=progress, total_bytes=5e6)
    assert said.strip() == "5000000"
    assert progress.count == 5_000_000
    with pytest.raises(CommandError, match=r"\(4\): why"):
        connection.pipe(["head", "-c", "9000000", "/dev/zero"], ["sh", "-c", "echo why >&2; exit 4"])
    with pytest.raises(FleetError, match=r"here: 'sh -c .* failed: broken"):
        connection.pipe(["sh", "-c", "echo broken >&2; exit 1"], ["cat"])
    with pytest.raises(FleetError, match=r"here: 'sh -c .* failed: it gave no reason"):
        connection.pipe(["sh", "-c", "echo half; kill -9 $$"], ["cat"])
    with pytest.raises(FleetError, match="'not-there' cannot be started"):
        connection.pipe(["not-there"], ["cat"])
    with pytest.raises(UnknownOutcomeError, match=r"did not end in 0\.5 s"):
        connection.pipe(["sleep", "60"], ["cat"], timeout_s=0.5)


def test_several_threads_share_a_connection(connection: NodeConnection) -> None:
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        answers[number] = connection.run(["echo", str(number)]).stdout

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: f"{number}\n" for number in range(6)}


def test_a_changed_key_is_refused_with_both_fingerprints(healthy: Fleet) -> None:
    node = healthy.nodes[2]
    node.rekey()
    with pytest.raises(
        HostKeyError, match=r"has changed: .*known_hosts says SHA256:\S+ and .* shows SHA256:\S+; .*fab trust"
    ):
        to(healthy, node).run(["touch", "/srv/changed"])
    assert not node.path("/srv/changed").exists()


def test_a_rebuilt_node_is_reached_again_when_its_new_key_is_trusted(healthy: Fleet, tmp_path: Path) -> None:
    node, known_hosts = healthy.nodes[2], tmp_path / "known_hosts"
    shutil.copy(healthy.inventory / "known_hosts", known_hosts)
    node.rekey()
    target = described(healthy, node)
    shown = scan(target)
    assert f"{shown.type} {shown.base64}" == node.host_key
    with pytest.raises(HostKeyError, match="--replace"):
        trust(target, known_hosts, shown.fingerprint)
    trust(target, known_hosts, shown.fingerprint, replace=True)
    for other in (target, described(healthy, healthy.nodes[0])):
        with NodeConnection(other, known_hosts) as connection:
            assert connection.run(["hostname"]).stdout == f"{other.name}\n"


def test_an_unknown_key_is_refused_with_its_fingerprint(fleet: Fleet, node: Node, tmp_path: Path) -> None:
    for known_hosts in (tmp_path / "missing", tmp_path / "empty"):
        (tmp_path / "empty").touch()
        with pytest.raises(
            HostKeyError, match=r"ssh-ed25519 SHA256:\S+ is not in .*; compare .* fab trust --node node1"
        ):
            NodeConnection(described(fleet, node), known_hosts).run(["true"])
    other = FleetNode(name="alias", host=node.address, port=2222, key_file=fleet.key)
    with pytest.raises(UnreachableError):  # the key of port 22 says nothing about another port
        NodeConnection(other, fleet.inventory / "known_hosts").run(["true"])


def test_a_damaged_known_hosts_is_named(fleet: Fleet, node: Node, tmp_path: Path) -> None:
    (tmp_path / "known_hosts").write_text(f"{node.address} ssh-ed25519 not-base64!\n")
    with pytest.raises(HostKeyError, match="known_hosts: cannot be read"):
        NodeConnection(described(fleet, node), tmp_path / "known_hosts").run(["true"])


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ("other", r"the node refuses our key for root"),
        ("missing", r"the private key .* cannot be read \(No such file"),
        ("garbage", r"is no private key that can be used"),
        ("locked", r"is protected by a passphrase; add it to the ssh agent"),
    ],
)
def test_a_key_that_does_not_open_is_told(fleet: Fleet, node: Node, tmp_path: Path, damage: str, sentence: str) -> None:
    key = tmp_path / "key"
    if damage == "other":
        key.write_text(new_key()[0])
    elif damage == "garbage":
        key.write_text("no key")
    elif damage == "locked":
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret words", "-f", key], check=True)
    wrong = dataclasses.replace(described(fleet, node), key_file=key)
    with pytest.raises(AccessError, match=sentence):
        NodeConnection(wrong, fleet.inventory / "known_hosts").run(["true"])


def test_nobody_there_is_unreachable_in_time(fleet: Fleet, node: Node, tmp_path: Path) -> None:
    known_hosts = fleet.inventory / "known_hosts"
    closed = dataclasses.replace(described(fleet, node), port=4)
    with pytest.raises(UnreachableError, match=r"no ssh connection \(.*refused"):
        NodeConnection(closed, known_hosts).run(["true"])
    nowhere = dataclasses.replace(described(fleet, node), host="nowhere.invalid")
    with pytest.raises(UnreachableError, match=r"no ssh connection \(.*(not known|resolution|nowhere)"):
        NodeConnection(nowhere, known_hosts).run(["true"])


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_who_accepts_and_hangs_is_unreachable_in_time(
    fleet: Fleet, greeting: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafthouse.fleet.pinned.CONNECT_S", 1)
    held = []

    def accept() -> None:
        one, _ = listener.accept()
        one.sendall(greeting)
        held.append(one)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        node = FleetNode(name="hung", host="127.0.0.1", port=listener.getsockname()[1], key_file=fleet.key)
        begin = time.monotonic()
        with pytest.raises(UnreachableError, match=r"hung \(127\.0\.0\.1:\d+\): no ssh connection"):
            NodeConnection(node, fleet.inventory / "known_hosts").run(["true"])
        assert time.monotonic() - begin < 60
    for one in held:
        one.close()


def test_a_session_that_is_killed_is_an_unknown_outcome(connection: NodeConnection, node: Node) -> None:
    error = failure_of(connection, ["sleep", "654"], node, lambda: kill_sessions(node))
    assert isinstance(error, UnknownOutcomeError)
    assert "the connection broke while 'sleep 654' ran; whether it took effect is not known" in str(error)
    assert connection.run(["echo", "again"]).stdout == "again\n"  # a new connection


def test_what_may_be_repeated_is_repeated_once(connection: NodeConnection, node: Node) -> None:
    node.write("/srv/tries", b"")
    command = "echo x >> /srv/tries; [ $(wc -l < /srv/tries) -gt 1 ] || sleep 987"
    assert failure_of(connection, ["sh", "-c", command], node, lambda: kill_sessions(node), again=True) is None
    assert node.path("/srv/tries").read_text() == "x\nx\n"


def test_a_node_that_was_replaced_by_a_reboot_is_connected_anew(healthy: Fleet) -> None:
    node = healthy.nodes[1]
    with to(healthy, node) as connection:
        connection.run(["touch", "/tmp/gone", "/srv/kept"])
        node.restart()
        assert connection.run(["ls", "/srv/kept"]).stdout.split() == ["/srv/kept"]
        assert connection.run(["ls", "/tmp/gone"], check=False).exit == 2
        node.kill()
        with pytest.raises(UnreachableError):
            connection.run(["true"])


def test_a_cut_while_a_command_runs_ends_in_an_unknown_outcome_in_time(
    healthy: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafthouse.fleet.connection.SLACK_S", 2)
    monkeypatch.setattr("drafthouse.fleet.connection.KILL_AFTER_S", 1)
    node = healthy.nodes[0]
    with to(healthy, node) as connection:
        error = failure_of(connection, ["sleep", "4321"], node, node.cut, timeout_s=8)
        assert isinstance(error, UnknownOutcomeError)
        assert "no end of 'sleep 4321' was told in 11 s; whether it took effect is not known" in str(error)
        with monkeypatch.context() as patch:
            patch.setattr("drafthouse.fleet.pinned.CONNECT_S", 1)
            with pytest.raises(UnreachableError):
                connection.run(["true"])
        node.join()
        node.await_sshd()
        assert connection.run(["hostname"]).stdout == "node1\n"


def test_a_command_that_is_never_confirmed_is_given_up(connection: NodeConnection, node: Node) -> None:
    channel = connection._channel()
    sessions = sessions_of(node)
    for pid in sessions:
        os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError):
            exchange(channel, "true", b"", 0.3, 1000)
    finally:
        for pid in sessions:
            os.kill(pid, signal.SIGCONT)
    assert connection.run(["echo", "well"]).stdout == "well\n"


def test_a_stream_of_a_node_that_is_cut_ends_by_itself(healthy: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafthouse.fleet.pinned.KEEPALIVE_S", 1)
    monkeypatch.setattr("drafthouse.fleet.pinned.SILENCE_MS", 1000)
    node = healthy.nodes[1]
    with to(healthy, node) as connection:
        lines = connection.stream(["sh", "-c", "echo first; exec sleep 1000"])
        assert next(lines) == "first"
        node.cut()
        with pytest.raises(UnknownOutcomeError, match="the connection broke while"):
            next(lines)


def test_more_sessions_than_the_node_opens_are_waited_for_and_refused_in_words(
    connection: NodeConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [connection.stream(["sh", "-c", "echo open; exec sleep 60"]) for _ in range(10)]
    try:
        assert [next(stream) for stream in streams] == ["open"] * 10
        with monkeypatch.context() as patch:
            patch.setattr("drafthouse.fleet.connection.SLACK_S", 3)
            with pytest.raises(AccessError, match="opens no further session"):
                connection.run(["true"])
    finally:
        for stream in streams:
            stream.close()
    assert connection.run(["echo", "well"]).stdout == "well\n"


def failure_of(
    connection: NodeConnection, argv: list[str], node: Node, harm: Callable[[], None], **options: Any
) -> BaseException | None:
    """How `run` fails when `harm` is done while the command, which ends in `sleep NUMBER`, does that on the node; None
    when it does not fail."""
    number = argv[-1].split()[-1]
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            connection.run(argv, **options)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    until(
        lambda: running(node, f"sleep {number}"), f"sleep {number}", unless=lambda: caught and f"it raised {caught[0]}"
    )
    harm()
    thread.join(120)
    assert not thread.is_alive()
    return caught[0] if caught else None


def kill_sessions(node: Node) -> None:
    """Kill the sshd processes of all connections at once."""
    for pid in sessions_of(node):
        os.kill(pid, signal.SIGKILL)


def sessions_of(node: Node) -> list[int]:
    found = [pid for pid, line in node.pids().items() if line.startswith("sshd: root")]
    assert found
    return found
