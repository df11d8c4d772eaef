"""Bulk transfer by the programs that are best at it, rsync and ssh, under the same host keys as all else."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from drafthouse.errors import FleetError
from drafthouse.fleet.errors import AccessError, CommandError, HostKeyError, UnknownOutcomeError, UnreachableError
from drafthouse.fleet.node import Node
from drafthouse.fleet.pinned import CONNECT_S, KEEPALIVE_S
from drafthouse.progress import Progress

_BROKEN = 255
_CHUNK = 1 << 20


def copy_tree(node: Node, known_hosts: Path, local: Path, remote: str, limit_s: float) -> None:
    """Make the folder `remote` on the node, which is there, a copy of the folder `local` by rsync(1): what is there
    too much is deleted.

    Raises:
        FleetError: rsync or ssh is missing here.
        UnreachableError, HostKeyError, AccessError: as for every connection.
        CommandError: rsync says why it could not.
        UnknownOutcomeError: it did not end in `limit_s` seconds.
    """
    with ssh(node, known_hosts) as words:
        # --protect-args: no shell on the node reads the path; a trailing slash means the folder's content.
        options = [
            "--archive",
            "--delete",
            "--protect-args",
            f"--timeout={4 * KEEPALIVE_S}",
            f"--rsh={shlex.join(words)}",
        ]
        source, target = f"{local.resolve()}/", f"{node.user}@{_bracketed(node.host)}:{remote.rstrip('/')}/"
        argv = ["rsync", *options, "--", source, target]
        try:
            done = subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL, timeout=limit_s, check=False)
        except FileNotFoundError:
            raise FleetError("rsync is not installed here", where="copy_tree", fix="install it (apt: rsync)") from None
        except subprocess.TimeoutExpired:
            raise UnknownOutcomeError(
                f"rsync did not end in {limit_s:g} s", where=str(node), fix="copy again: rsync goes on where it was"
            ) from None
        if done.returncode:
            raise _failure(node, known_hosts, f"rsync to {remote}", done.returncode, done.stderr)


def pipe(
    node: Node,
    known_hosts: Path,
    local_argv: Sequence[str],
    remote_argv: Sequence[str],
    progress: Progress,
    description: str,
    total_bytes: float | None,
    limit_s: float,
) -> str:
    """Feed the output of a program here to a program on the node; what the latter wrote to stdout.

    Raises:
        FleetError: the program here failed, or it or ssh is missing; what the other did with half of it is not known.
        UnreachableError, HostKeyError, AccessError: as for every connection.
        CommandError: the program on the node failed.
        UnknownOutcomeError: they did not end in `limit_s` seconds.
    """
    with (
        ssh(node, known_hosts) as words,
        progress.task(description, total_bytes) as task,
        tempfile.TemporaryFile() as complaints,
        tempfile.TemporaryFile() as remote_complaints,
        tempfile.TemporaryFile() as output,
    ):
        try:
            source = subprocess.Popen(
                list(local_argv), stdout=subprocess.PIPE, stderr=complaints, stdin=subprocess.DEVNULL
            )
        except OSError as error:
            raise FleetError(
                f"'{local_argv[0]}' cannot be started ({error.strerror})", where="here", fix="install it"
            ) from None
        target = [*words, "-l", node.user, "--", node.host, shlex.join(remote_argv)]
        sink = subprocess.Popen(target, stdin=subprocess.PIPE, stdout=output, stderr=remote_complaints)
        assert source.stdout is not None
        assert sink.stdin is not None
        late, unread = threading.Event(), False

        def give_up() -> None:
            late.set()
            source.kill()
            sink.kill()

        watch = threading.Timer(limit_s, give_up)
        watch.start()
        try:
            while chunk := source.stdout.read(_CHUNK):
                sink.stdin.write(chunk)
                task.advance(len(chunk))
        except BrokenPipeError:
            unread = True  # the other side has ended: its exit status tells why
            source.kill()
        except BaseException:
            source.kill()
            sink.kill()
            raise
        finally:
            with suppress(BrokenPipeError):
                sink.stdin.close()
            source.stdout.close()
            source.wait()
            sink.wait()
            watch.cancel()
        if late.is_set():
            raise UnknownOutcomeError(
                f"{shlex.join(remote_argv)} did not end in {limit_s:g} s",
                where=str(node),
                fix="whether it took effect is not known: look before you repeat it",
            )
        if source.returncode and not unread:
            raise FleetError(
                f"'{shlex.join(local_argv)}' failed: {_last(_content(complaints))}", where="here", fix="run it by hand"
            )
        if sink.returncode:
            command = shlex.join(remote_argv)
            raise _failure(node, known_hosts, command, sink.returncode, _content(remote_complaints))
        return _content(output).decode(errors="replace")


@contextmanager
def ssh(node: Node, known_hosts: Path) -> Iterator[list[str]]:
    """The words of an ssh(1) that reads no configuration but ours; a file, because paths may hold spaces."""
    if shutil.which("ssh") is None:
        raise FleetError("ssh is not installed here", where=str(node), fix="install it (apt: openssh-client)")
    lines = [
        f"Port {node.port}",
        f'UserKnownHostsFile "{known_hosts.resolve()}"',
        "GlobalKnownHostsFile none",
        "StrictHostKeyChecking yes",
        "UpdateHostKeys no",
        "BatchMode yes",
        "ForwardAgent no",
        f"ConnectTimeout {CONNECT_S}",
        f"ServerAliveInterval {KEEPALIVE_S}",
        "ServerAliveCountMax 3",
    ]
    if node.key_file is not None:
        lines += [f'IdentityFile "{node.key_file.resolve()}"', "IdentitiesOnly yes"]
    with tempfile.TemporaryDirectory(prefix="drafthouse-ssh-") as folder:
        config = Path(folder) / "config"
        config.write_text("\n".join(lines) + "\n", encoding="utf-8")
        yield ["ssh", "-F", str(config)]


def _failure(node: Node, known_hosts: Path, what: str, exit: int, stderr: bytes) -> FleetError:
    """What a failed rsync or ssh means, by exit status and words of ssh(1)."""
    where, text = str(node), stderr.decode(errors="replace")
    if "Host key verification failed" in text or "HOST IDENTIFICATION HAS CHANGED" in text:
        return HostKeyError(f"its host key is not the one in {known_hosts}", where=where, fix="see `fab trust`")
    if "Permission denied (" in text:
        return AccessError(f"the node refuses our key for {node.user}", where=where, fix="see its authorized_keys")
    if exit == _BROKEN:
        return UnreachableError(f"{what}: {_last(stderr)}", where=where, fix="check whether it is up, and try again")
    if "No space left on device" in text:
        return CommandError(
            f"{what}: the disk is full", exit=exit, stderr=_last(stderr), where=where, fix="free some space there"
        )
    return CommandError(f"{what} failed ({exit}): {_last(stderr)}", exit=exit, stderr=_last(stderr), where=where)


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _last(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    return " / ".join(lines[-3:]) or "it gave no reason"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
