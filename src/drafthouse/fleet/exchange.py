"""One command over one ssh channel: bytes in, bytes out, bounded in time and size.

Fabric's own `run` feeds input a character at a time, decodes what it reads and leaves a command that outlives its
time limit unmentioned; a channel needs little more than this loop.
"""

from __future__ import annotations

import select
import threading
import time
from dataclasses import dataclass

import paramiko

_CHUNK = 1 << 15
_LINGER_S = 2.0
"""How long output may follow the exit status: a child in the background can hold the pipes open for ever."""


@dataclass(frozen=True)
class Outcome:
    """What a command has written and its exit status; None: the channel ended without one."""

    exit: int | None
    stdout: bytes
    stderr: bytes


class TooMuchError(Exception):
    """The command wrote more than was allowed."""


def exchange(channel: paramiko.Channel, command: str, input: bytes, limit_s: float, limit_bytes: int) -> Outcome:
    """Run `command` with `input` on its stdin, and collect what it writes.

    Raises:
        SSHException, EOFError, OSError: the connection broke.
        TimeoutError: no exit status within `limit_s` seconds.
        TooMuchError: it wrote more than `limit_bytes` bytes.
    """
    deadline = time.monotonic() + limit_s
    begin(channel, command, limit_s)
    rest = memoryview(input)
    out, err = bytearray(), bytearray()
    ended: float | None = None
    if not rest:
        channel.shutdown_write()
    arrivals = select.poll()
    arrivals.register(channel.fileno(), select.POLLIN)
    while True:
        rest = _send(channel, rest)
        _drain(channel, out, err)
        if len(out) + len(err) > limit_bytes:
            raise TooMuchError
        now = time.monotonic()
        over = channel.closed or (channel.eof_received and not channel.recv_ready())
        if channel.exit_status_ready():
            ended = ended or now
            if over or now - ended > _LINGER_S:
                break
        if now > deadline:
            raise TimeoutError
        pause = min(deadline - now, 0.05 if rest or ended else 1.0)
        if over:
            channel.status_event.wait(min(pause, 0.05))  # what is at its end is always readable
        else:
            arrivals.poll(pause * 1000)
    _drain(channel, out, err)
    return Outcome(channel.exit_status if channel.exit_status >= 0 else None, bytes(out), bytes(err))


def begin(channel: paramiko.Channel, command: str, limit_s: float) -> None:
    """Start `command`.

    Raises:
        SSHException, EOFError, OSError: the connection broke.
        TimeoutError: the other side did not confirm it in time; paramiko itself would wait for ever.
    """
    channel.settimeout(limit_s)
    late = threading.Event()

    def give_up() -> None:
        late.set()
        channel.close()

    watch = threading.Timer(limit_s, give_up)
    watch.daemon = True
    watch.start()
    try:
        channel.exec_command(command)
    except (OSError, EOFError, paramiko.SSHException):
        if late.is_set():
            raise TimeoutError from None
        raise
    finally:
        watch.cancel()


def _send(channel: paramiko.Channel, rest: memoryview) -> memoryview:
    while rest and channel.send_ready():
        try:
            rest = rest[channel.send(rest[:_CHUNK]) :]
            if not rest:
                channel.shutdown_write()
        except OSError:
            return rest[:0]  # the command has ended without reading all of it: its exit status tells the rest
    return rest


def _drain(channel: paramiko.Channel, out: bytearray, err: bytearray) -> None:
    while channel.recv_ready():
        out += channel.recv(1 << 16)
    while channel.recv_stderr_ready():
        err += channel.recv_stderr(1 << 16)
