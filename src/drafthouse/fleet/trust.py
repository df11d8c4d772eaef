"""Host keys: which one a node shows, and writing into known_hosts that it is trusted. Never silently."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import paramiko
from paramiko.hostkeys import HostKeyEntry, HostKeys, InvalidHostKey

from drafthouse.fleet import pinned
from drafthouse.fleet.errors import HostKeyError, UnreachableError
from drafthouse.fleet.node import Node

_ALGORITHMS = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256")}
"""Signature algorithms of a type of key, where they have other names than it (RFC 8332)."""


@dataclass(frozen=True)
class HostKey:
    """A host key: its type, its fingerprint as ssh-keygen(1) shows it (`SHA256:…`), and itself in base64."""

    type: str
    fingerprint: str
    base64: str


def scan(node: Node, types: Sequence[str] = ()) -> HostKey:
    """The host key that the node proves to have. Whether that is the right one is for others to say.

    Args:
        types: types of key that are asked for first.

    Raises:
        UnreachableError: nobody answers there, or not as an ssh server.
    """
    try:
        with socket.create_connection((node.host, node.port), pinned.CONNECT_S) as connection:
            transport = paramiko.Transport(connection)
            options = transport.get_security_options()
            wanted = [one for kind in types for one in _ALGORITHMS.get(kind, (kind,)) if one in options.key_types]
            options.key_types = [*wanted, *(one for one in options.key_types if one not in wanted)]
            transport.banner_timeout = transport.handshake_timeout = pinned.CONNECT_S
            try:
                transport.start_client(timeout=pinned.CONNECT_S)
                key = transport.get_remote_server_key()
            finally:
                transport.close()
    except (OSError, EOFError, paramiko.SSHException) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnreachableError(
            f"it shows no host key ({reason})", where=str(node), fix="check address, port and whether it is up"
        ) from None
    return HostKey(key.get_name(), key.fingerprint, key.get_base64())


def trust(node: Node, known_hosts: Path, fingerprint: str | None = None, *, replace: bool = False) -> HostKey:
    """Write the node's host key into `known_hosts`; a key that stands there already is left as it is.

    Args:
        fingerprint: what the key must be (`SHA256:…`, as the node's owner says); None: whatever it is.
        replace: take the place of another key of the node.

    Raises:
        UnreachableError: nobody answers there.
        HostKeyError: the fingerprint is another one; another key is known and `replace` is not given; the file cannot
            be read or written. Nothing is changed then.
    """
    lines = _lines(known_hosts)
    known = [entry for line in lines for entry in _entries(line, node)]
    key = scan(node, [entry.key.get_name() for entry in known])
    if fingerprint is not None and not _same(fingerprint, key):
        raise HostKeyError(
            f"it shows the host key {key.fingerprint} and not {fingerprint.strip()}",
            where=str(node),
            fix="trust nothing until you know why",
        )
    if any((entry.key.get_name(), entry.key.get_base64()) == (key.type, key.base64) for entry in known):
        return key
    if known and not replace:
        raise HostKeyError(
            f"{known_hosts} knows it by another host key, {known[0].key.fingerprint}; it shows {key.fingerprint}",
            where=str(node),
            fix=f"find out why; if it was rebuilt: fab trust --node {node.name} --replace",
        )
    kept = [line for line in (_without(line, node) for line in lines) if line is not None]
    _write(known_hosts, "".join([*kept, f"{node.known_as} {key.type} {key.base64}\n"]))
    return key


def _same(fingerprint: str, key: HostKey) -> bool:
    wanted = fingerprint.strip()
    return wanted in {key.fingerprint, key.fingerprint.removeprefix("SHA256:")}


def _lines(known_hosts: Path) -> list[str]:
    try:
        text = known_hosts.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise HostKeyError(f"cannot be read ({error})", where=str(known_hosts), fix="correct the file") from None
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    return lines


def _entries(line: str, node: Node) -> Iterator[HostKeyEntry]:
    """The entry of a line of known_hosts, when it is about the node: by its name, or by a hash of that."""
    # A line that starts with a marker (`@revoked`) says something else than that a key is trusted.
    if line.lstrip().startswith(("#", "@")):
        return
    with suppress(InvalidHostKey, paramiko.SSHException):
        entry = HostKeyEntry.from_line(line)
        if entry is not None and any(_is(name, node) for name in entry.hostnames):
            yield entry


def _is(name: str, node: Node) -> bool:
    return name == node.known_as or (name.startswith("|1|") and HostKeys.hash_host(node.known_as, name) == name)


def _without(line: str, node: Node) -> str | None:
    """The line without the node; None when nobody is left on it."""
    if not list(_entries(line, node)):
        return line
    hosts, rest = line.split(maxsplit=1)
    others = [name for name in hosts.split(",") if not _is(name, node)]
    return f"{','.join(others)} {rest}" if others else None


def _write(known_hosts: Path, text: str) -> None:
    """Replace the file as a whole, with the mode that it had."""
    try:
        known_hosts.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        mode = known_hosts.stat().st_mode & 0o777 if known_hosts.exists() else 0o600
        descriptor, name = tempfile.mkstemp(prefix=".known_hosts.", dir=known_hosts.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            Path(name).replace(known_hosts)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise HostKeyError(
            f"cannot be written ({error.strerror})", where=str(known_hosts), fix="check permissions and space"
        ) from None
