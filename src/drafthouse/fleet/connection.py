"""A node over ssh: commands, files, logs, ports and bulk transfer; everything bounded, and nothing through a shell that
was not quoted. No value is passed as an environment variable: Fabric would put it into the command line."""

from __future__ import annotations

import codecs
import shlex
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import paramiko

from drafthouse.errors import FleetError
from drafthouse.fleet import openssh, shell_text
from drafthouse.fleet.errors import AccessError, CommandError, UnknownOutcomeError, UnreachableError
from drafthouse.fleet.exchange import Outcome, TooMuchError, begin, exchange
from drafthouse.fleet.node import Node
from drafthouse.fleet.pinned import PinnedConnection, connect
from drafthouse.fleet.tunnel import tunnel
from drafthouse.progress import Progress, Silent

KILL_AFTER_S = 5
"""Between the SIGTERM and the SIGKILL of a command that takes too long."""
SLACK_S = 10
"""What the network may add to the time limit of a command."""
TIMED_OUT = 124
"""Exit status of timeout(1)."""
SESSION_POLL_S = 0.1
MAX_OUTPUT = 64 << 20
MAX_LINE = 1 << 20
BULK_S = 6 * 3600.0


@dataclass(frozen=True)
class Answer:
    """What a command said. `exit` is its exit status (128 + n for signal n), which is always known: a command whose
    end is not known raises `UnknownOutcomeError`."""

    exit: int
    stdout: str
    stderr: str


class NodeConnection:
    """A connection to `node`, opened when it is first needed or entered; may be used by several threads.

    A connection that is found broken before anything was sent is opened once more; what was sent is repeated only where
    the caller says that it may be (`again=True`).

    Args:
        node: whom to talk to.
        known_hosts: file of the host keys that are trusted.

    Raises (every method):
        UnreachableError: no answer; nothing is known about what runs there.
        HostKeyError: its key is unknown or has changed.
        AccessError: it refuses our key.
        UnknownOutcomeError: the connection broke while something ran.
    """

    def __init__(self, node: Node, known_hosts: Path) -> None:
        self.node, self.known_hosts = node, known_hosts
        self._connection: PinnedConnection | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float = 60.0,
        input: bytes | str | None = None,
        check: bool = True,
        again: bool = False,
    ) -> Answer:
        """Run a command, words as they are. After `timeout_s` seconds it is ended on the node (exit status 124).

        Args:
            check: an exit status other than 0 is an error.
            again: it may be run twice: when the connection breaks it is tried once more.

        Raises:
            CommandError: it failed (with `check`), or wrote more than 64 MiB.
        """
        return self._run(argv, _shown(argv), timeout_s, _bytes(input), check, again)

    def script(
        self,
        text: str,
        argv: Sequence[str] = (),
        *,
        interpreter: Literal["python3", "sh"] = "python3",
        timeout_s: float = 60.0,
        input: bytes | str | None = None,
        check: bool = True,
        again: bool = False,
    ) -> Answer:
        """Run a program that is sent on stdin, followed by its own `input`; it stands in no file and no process list.

        Raises:
            CommandError: as `run`.
        """
        program = text.encode()
        stub = ["-c", shell_text.SENT_PYTHON] if interpreter == "python3" else ["-c", shell_text.SENT, interpreter]
        words = [interpreter, *stub, str(len(program)), *argv]
        shown = _shown([interpreter, "-", *argv])
        return self._run(words, shown, timeout_s, program + _bytes(input), check, again)

    def write(self, path: str, content: bytes | str, mode: int = 0o600, *, timeout_s: float = 60.0) -> None:
        """Write a file as a whole or not at all; folders that are missing are made with mode 0700.

        Raises:
            CommandError: it cannot be written there; a full disk is named as such.
        """
        data = _bytes(content)
        words = ["sh", "-c", shell_text.WRITE, "sh", path, f"{mode:o}", str(len(data))]
        answer = self._run(words, f"write {path}", timeout_s, data, check=False, again=True)
        if answer.exit:
            full = "No space left on device" in answer.stderr
            raise CommandError(
                f"{path} cannot be written: the disk is full" if full else f"{path}: {_last(answer.stderr)}",
                exit=answer.exit,
                stderr=_last(answer.stderr),
                where=str(self.node),
                fix="free some space there" if full else "check path and permissions",
            )

    def read(self, path: str, *, timeout_s: float = 60.0) -> bytes | None:
        """Content of a file (at most 64 MiB); None when there is none.

        Raises:
            CommandError: it is there and cannot be read.
        """
        words = ["sh", "-c", shell_text.READ, "sh", path]
        outcome = self._attempt(words, f"read {path}", timeout_s, b"", again=True)
        if outcome.exit == shell_text.MISSING:
            return None
        if outcome.exit:
            raise self._failure(f"read {path}", timeout_s, outcome.exit, outcome.stderr.decode(errors="replace"))
        return outcome.stdout

    def stream(self, argv: Sequence[str]) -> Iterator[str]:
        """Lines of a command (stdout and stderr) as they come, without their ends, for as long as it runs. Closing the
        iterator ends the command on the node.

        Raises:
            CommandError: it ended with another exit status than 0.
        """
        channel = self._channel()
        command = _quoted(["sh", "-c", shell_text.FOLLOW, "sh", *argv], self.node)
        try:
            try:
                begin(channel, command, SLACK_S)
            except (OSError, EOFError, paramiko.SSHException):  # TimeoutError is an OSError
                raise self._unknown(f"the connection broke when '{_shown(argv)}' was begun") from None
            channel.settimeout(None)
            last = ""
            for last in _lines(channel):
                yield last
            channel.status_event.wait(SLACK_S)
            if channel.exit_status < 0:
                raise self._unknown(f"the connection broke while '{_shown(argv)}' ran")
            if channel.exit_status:
                raise self._failure(_shown(argv), None, channel.exit_status, last)
        finally:
            channel.close()

    @contextmanager
    def forward(self, port: int) -> Iterator[int]:
        """A port on 127.0.0.1 here that leads to `port` on 127.0.0.1 of the node, until the block ends."""
        with tunnel(self._open(), port) as local:
            yield local

    def copy_tree(self, local: Path, remote: str, *, timeout_s: float = BULK_S) -> None:
        """Make the folder `remote` on the node (made where missing) a copy of the folder `local`, by rsync.

        Raises:
            FleetError: there is no such folder here, or no rsync.
            CommandError: it cannot be written there, or rsync is missing there.
        """
        if not local.is_dir():
            raise FleetError("there is no such folder to copy", where=str(local), fix="check the path")
        self.run(["mkdir", "-p", "--", remote], again=True)
        openssh.copy_tree(self.node, self.known_hosts, local, remote, timeout_s)

    def pipe(
        self,
        local_argv: Sequence[str],
        remote_argv: Sequence[str],
        *,
        progress: Progress | None = None,
        description: str = "transfer",
        total_bytes: float | None = None,
        timeout_s: float = BULK_S,
    ) -> str:
        """Feed the output of a program here to one on the node (`docker save | docker load`); what the latter said. The
        bar counts bytes.

        Raises:
            FleetError: the program here failed.
            CommandError: the one on the node failed.
        """
        return openssh.pipe(
            self.node,
            self.known_hosts,
            local_argv,
            remote_argv,
            progress or Silent(),
            description,
            total_bytes,
            timeout_s,
        )

    def _open(self) -> paramiko.Transport:
        with self._lock:
            if self._connection is None or not self._connection.is_connected:
                if self._connection is not None:
                    self._connection.close()
                self._connection = connect(self.node, self.known_hosts)
            transport = self._connection.transport
            assert transport is not None
            return transport

    def _channel(self) -> paramiko.Channel:
        """A new channel. Nothing has been sent on it, so a connection that turns out to be broken is simply replaced,
        and a node that is at its limit of sessions (MaxSessions, sshd_config(5): ten) is waited for."""
        end, broken = time.monotonic() + SLACK_S, False
        while True:
            transport = self._open()
            try:
                return transport.open_session(timeout=SLACK_S)
            except paramiko.ChannelException as error:
                if time.monotonic() > end:
                    raise AccessError(
                        f"the node opens no further session ({error.text})",
                        where=str(self.node),
                        fix="do less at once, or raise MaxSessions in its sshd_config",
                    ) from None
                time.sleep(SESSION_POLL_S)
            except (OSError, EOFError, paramiko.SSHException) as error:
                transport.close()
                if broken:
                    reason = " ".join(str(error).split()) or type(error).__name__
                    raise UnreachableError(
                        f"no session ({reason})", where=str(self.node), fix="check whether it is up"
                    ) from None
                broken = True

    def _run(self, argv: Sequence[str], shown: str, timeout_s: float, input: bytes, check: bool, again: bool) -> Answer:
        outcome = self._attempt(argv, shown, timeout_s, input, again)
        answer = Answer(
            outcome.exit or 0, outcome.stdout.decode(errors="replace"), outcome.stderr.decode(errors="replace")
        )
        if check and answer.exit:
            raise self._failure(shown, timeout_s, answer.exit, answer.stderr or answer.stdout)
        return answer

    def _attempt(self, argv: Sequence[str], shown: str, timeout_s: float, input: bytes, again: bool) -> Outcome:
        try:
            return self._exchange(argv, shown, timeout_s, input)
        except UnknownOutcomeError:
            if not again:
                raise
        return self._exchange(argv, shown, timeout_s, input)

    def _exchange(self, argv: Sequence[str], shown: str, timeout_s: float, input: bytes) -> Outcome:
        """Run `argv`, which is called `shown` in messages; an outcome with an exit status."""
        # `; exit $?`: so that a shell stays around it, which turns death by a signal into an exit status.
        guard = ["timeout", "-k", str(KILL_AFTER_S), f"{timeout_s:g}"]
        command = f"{_quoted([*guard, *argv], self.node)}; exit $?"
        limit_s = timeout_s + KILL_AFTER_S + SLACK_S
        channel = self._channel()
        try:
            outcome = exchange(channel, command, input, limit_s, MAX_OUTPUT)
        except TooMuchError:
            raise CommandError(
                f"'{shown}' wrote more than {MAX_OUTPUT >> 20} MiB",
                exit=-1,
                where=str(self.node),
                fix="ask for less",
            ) from None
        except TimeoutError:
            raise self._unknown(f"no end of '{shown}' was told in {limit_s:g} s") from None
        except (OSError, EOFError, paramiko.SSHException):
            raise self._unknown(f"the connection broke while '{shown}' ran") from None
        finally:
            with suppress(OSError, EOFError):
                channel.close()
        if outcome.exit is None:
            raise self._unknown(f"the connection broke while '{shown}' ran")
        return outcome

    def _unknown(self, what: str) -> UnknownOutcomeError:
        return UnknownOutcomeError(
            what, where=str(self.node), fix="whether it took effect is not known: look before you repeat it"
        )

    def _failure(self, shown: str, timeout_s: float | None, exit: int, stderr: str) -> CommandError:
        if exit == TIMED_OUT and timeout_s is not None:
            what = f"'{shown}' took longer than {timeout_s:g} s and was ended"
        else:
            what = f"'{shown}' failed ({exit}): {_last(stderr)}"
        return CommandError(what, exit=exit, stderr=_last(stderr), where=str(self.node))


def _quoted(argv: Sequence[str], node: Node) -> str:
    if any("\0" in word for word in argv):
        raise FleetError(f"a word of '{_shown(argv)}' holds a NUL", where=str(node), fix="no command can have it")
    return shlex.join(argv)


def _bytes(content: bytes | str | None) -> bytes:
    return content.encode() if isinstance(content, str) else content or b""


def _shown(argv: Sequence[str]) -> str:
    """The command for people: the text of a program that is part of it is left out."""
    words = [word if "\n" not in word and len(word) <= 200 else "…" for word in argv]
    text = shlex.join(words).replace("\0", "\\0")
    return text if len(text) <= 300 else f"{text[:299]}…"


def _last(stderr: str, lines: int = 5) -> str:
    kept = [line.strip() for line in stderr.strip().splitlines() if line.strip()][-lines:]
    return " / ".join(kept) or "it gave no reason"


def _lines(channel: paramiko.Channel) -> Iterator[str]:
    """Lines of a channel's stdout until it ends; one that goes on for more than 1 MiB is cut there."""
    decoder, rest = codecs.getincrementaldecoder("utf-8")(errors="replace"), ""
    while chunk := channel.recv(1 << 16):
        *whole, rest = (rest + decoder.decode(chunk)).split("\n")
        yield from whole
        while len(rest) > MAX_LINE:
            yield rest[:MAX_LINE]
            rest = rest[MAX_LINE:]
    rest += decoder.decode(b"", final=True)
    if rest:
        yield rest
