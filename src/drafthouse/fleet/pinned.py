"""An ssh connection that talks only to hosts whose key is in our known_hosts file.

Fabric 3.2 loads no host keys and accepts any, also a changed one (github.com/fabric/fabric/issues/2071); so the client
is replaced. The user's ssh and Fabric configuration are not read: what is not in the inventory does not count.
"""

from __future__ import annotations

import logging
import socket
import threading
from pathlib import Path
from typing import NoReturn

import fabric
import paramiko

from drafthouse.fleet.errors import AccessError, HostKeyError, UnreachableError
from drafthouse.fleet.node import Node

CONNECT_S = 10
KEEPALIVE_S = 15
SILENCE_MS = 45_000
"""Unacknowledged data, of which keepalive sees to it that there is some, ends the connection after this (tcp(7))."""

_NO_ANSWER, _NO_KEY = "Authentication timeout.", "No authentication methods available"  # words of paramiko

# Its transport thread logs a traceback for every host that hangs up; what matters of it is in our errors.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class _RejectAndSay(paramiko.RejectPolicy):  # type: ignore[misc]
    """Refuse an unknown key, and say which one it was."""

    def __init__(self, node: Node, known_hosts: Path) -> None:
        self._node, self._known_hosts = node, known_hosts

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> NoReturn:
        raise HostKeyError(
            f"its host key {key.get_name()} {key.fingerprint} is not in {self._known_hosts}",
            where=str(self._node),
            fix=f"compare it with what the node's owner says, then: fab trust --node {self._node.name}",
        )


class _Login(paramiko.Transport):  # type: ignore[misc]
    """Knows whether the other side has answered an offer of ours with no.

    Paramiko raises AuthenticationException for that, and also when the other side dies or hangs while it is asked.
    """

    refused = False

    def auth_publickey(self, username: str, key: paramiko.PKey, event: threading.Event | None = None) -> list[str]:
        try:
            allowed: list[str] = super().auth_publickey(username, key, event)
        except paramiko.AuthenticationException as error:
            # Who says no goes on listening, for the next key.
            self.refused = self.refused or (self.is_active() and str(error) != _NO_ANSWER)
            raise
        return allowed


class PinnedConnection(fabric.Connection):  # type: ignore[misc]
    """Fabric's connection to `node`, with keys from `known_hosts` only."""

    def __init__(self, node: Node, known_hosts: Path) -> None:
        super().__init__(
            node.host,
            user=node.user,
            port=node.port,
            config=fabric.Config(ssh_config=paramiko.SSHConfig(), lazy=True),
            forward_agent=False,
            connect_timeout=CONNECT_S,
            connect_kwargs={
                "banner_timeout": 1.5 * CONNECT_S,
                "auth_timeout": 2.0 * CONNECT_S,
                "channel_timeout": 2.0 * CONNECT_S,
                "allow_agent": node.key_file is None,
                "look_for_keys": node.key_file is None,
                "transport_factory": _Login,
            },
        )
        client = paramiko.SSHClient()
        client.set_missing_host_key_policy(_RejectAndSay(node, known_hosts))
        load_known_hosts(client, known_hosts)
        self.client = client


def connect(node: Node, known_hosts: Path) -> PinnedConnection:
    """Open a connection.

    Raises:
        UnreachableError: nobody answers, or not as an ssh server.
        HostKeyError: an unknown or another key.
        AccessError: our key is refused, missing or unreadable.
    """
    connection = PinnedConnection(node, known_hosts)
    if node.key_file is not None:
        connection.connect_kwargs["pkey"] = _private_key(node, node.key_file)
    try:
        connection.open()
        assert connection.transport is not None
        connection.transport.set_keepalive(KEEPALIVE_S)
        connection.transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS)
    except BaseException as error:
        login = connection.client.get_transport()
        refused = isinstance(login, _Login) and login.refused
        connection.client.close()
        _explain(error, node, known_hosts, refused)
    return connection


def load_known_hosts(client: paramiko.SSHClient, known_hosts: Path) -> None:
    """Let the client know the keys of the file; a file that is not there knows nobody.

    Raises:
        HostKeyError: it cannot be read.
    """
    try:
        client.load_host_keys(str(known_hosts))
    except FileNotFoundError:
        return
    except (OSError, ValueError, paramiko.hostkeys.InvalidHostKey) as error:
        raise HostKeyError(
            f"cannot be read as known_hosts ({error})", where=str(known_hosts), fix="correct or remove the line"
        ) from None


def _private_key(node: Node, file: Path) -> paramiko.PKey:
    fix = "correct ansible_ssh_private_key_file in the inventory"
    try:
        return paramiko.PKey.from_path(file)
    except OSError as error:
        reason = f"the private key {file} cannot be read ({error.strerror or error})"
    except (paramiko.PasswordRequiredException, TypeError):
        reason = f"the private key {file} is protected by a passphrase"
        fix = "add it to the ssh agent and leave ansible_ssh_private_key_file out"
    except (paramiko.SSHException, ValueError, IndexError) as error:
        reason = f"{file} is no private key that can be used ({error or type(error).__name__})"
    raise AccessError(reason, where=str(node), fix=fix) from None


def _explain(error: BaseException, node: Node, known_hosts: Path, refused: bool) -> NoReturn:
    where = str(node)
    if isinstance(error, paramiko.BadHostKeyException):
        raise HostKeyError(
            f"its host key has changed: {known_hosts} says {error.expected_key.fingerprint} and the node shows "
            f"{error.key.fingerprint}",
            where=where,
            fix=f"find out why; if it was rebuilt: fab trust --node {node.name} --replace",
        ) from None
    if isinstance(error, paramiko.SSHException) and str(error) == _NO_KEY:
        raise AccessError(
            f"there is no key to log in with as {node.user}",
            where=where,
            fix="add one to the ssh agent, or set ansible_ssh_private_key_file in the inventory",
        ) from None
    if refused and isinstance(error, paramiko.SSHException):
        raise AccessError(
            f"the node refuses our key for {node.user} ({error})",
            where=where,
            fix="put the public key into its authorized_keys, or correct ansible_user and the key in the inventory",
        ) from None
    if isinstance(error, (OSError, EOFError, paramiko.SSHException)):
        raise UnreachableError(
            f"no ssh connection ({_reason(error)})", where=where, fix="check address, port and whether it is up"
        ) from None
    raise error


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer in {CONNECT_S} s"
    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        # Its own text hides why: the reasons are those of the addresses that were tried.
        return "; ".join(sorted({str(one.strerror or one) for one in error.errors.values()}))
    return " ".join(str(error).split()) or type(error).__name__
