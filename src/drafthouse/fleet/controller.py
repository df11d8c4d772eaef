"""The operator's side of the fleet: inventory, records, lock, audit log, and the connections that are open."""

from __future__ import annotations

import getpass
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from drafthouse.errors import FleetError
from drafthouse.fleet.connection import NodeConnection
from drafthouse.fleet.inventory import Inventory
from drafthouse.fleet.jobs import Job, jobs
from drafthouse.fleet.node import Node
from drafthouse.fleet.proxy import Proxy
from drafthouse.fleet.records import Life, Records
from drafthouse.fleet.runtime.choose import runtime_of
from drafthouse.fleet.runtime.protocol import Launch, Runtime
from drafthouse.progress import Progress, Silent
from drafthouse.store import Store
from drafthouse.store.fence import Fence
from drafthouse.store.journal import Journal
from drafthouse.store.lock import Holder, Lock


class Controller:
    """Everything that a task needs; use it as a context manager, so that connections are closed.

    Args:
        inventory: the folder that Ansible reads too.
        environment: where the values of secrets come from, by name.
        who: the operator, for lock and audit log; default: user and host.

    Raises:
        FleetError: the inventory declares no store for the fleet.
        StoreError: that store cannot be reached, or ignores conditional puts.
    """

    def __init__(
        self,
        inventory: Inventory,
        *,
        progress: Progress | None = None,
        environment: Mapping[str, str] = os.environ,
        who: str | None = None,
    ) -> None:
        self.inventory, self.progress, self.environment = inventory, progress or Silent(), environment
        self.who = who or f"{getpass.getuser()}@{socket.gethostname()}"
        if inventory.fleet_store is None:
            raise FleetError(
                "the inventory declares no store for the fleet's records",
                where=str(inventory.path),
                fix="set `fleet_store` in group_vars/all.yml",
            )
        store = Store.open(inventory.fleet_store)
        store.probe()
        self._store = store.child("fleet")
        self.records, self.journal = Records(self._store), Journal(self._store)
        self._connections: dict[str, NodeConnection] = {}
        self._stack, self._guard = ExitStack(), threading.Lock()  # nodes are asked from several threads

    @classmethod
    def open(cls, path: Path = Path("inventory"), **options: Any) -> Controller:
        """The controller of an inventory folder."""
        return cls(Inventory.load(path), **options)

    def __enter__(self) -> Controller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def node(self, name: str) -> Node:
        """A node of the inventory; an unknown name is refused with the near ones."""
        return self.inventory.node(name)

    def connect(self, name: str) -> NodeConnection:
        """The connection to a node, opened when it is first used and kept for the whole task."""
        with self._guard:
            if name not in self._connections:
                connection = NodeConnection(self.node(name), self.inventory.known_hosts)
                self._connections[name] = connection
                self._stack.callback(connection.close)
            return self._connections[name]

    def job(self, name: str) -> Job:
        """A job of inventory/jobs/.

        Raises:
            FleetError: there is none of that name; its file is wrong.
        """
        known = jobs(self.inventory)
        if name not in known:
            raise FleetError(
                f"there is no job '{name}'",
                where=str(self.inventory.path / "jobs"),
                fix=f"known are {', '.join(sorted(known)) or 'none'}",
            )
        return known[name]

    def job_of(self, life: Life) -> Job:
        """The job as it was when `life` began: what a rollback starts again."""
        return Job.model_validate(life.spec)

    def store_of(self, job: Job) -> Store | None:
        """The store that the job's workers write to; None when it has none."""
        return None if job.store is None else Store.open(job.store)

    def fence_of(self, job: Job) -> Fence | None:
        """Where the job's workers read whether they have been replaced."""
        store = self.store_of(job)
        return None if store is None else Fence(store, job.name)

    def launch(self, job: Job, epoch: int, node: str) -> Launch:
        """What is started, with the secrets' values and what a worker has to know of itself.

        Raises:
            FleetError: a secret is not in the environment.
        """
        secrets = job.secret_values(self.environment)
        identity = {"DRAFTHOUSE_JOB": job.name, "DRAFTHOUSE_EPOCH": str(epoch), "DRAFTHOUSE_NODE": node}
        if job.store is not None:
            own = self.node(node).store if job.store == self.inventory.fleet_store else None
            identity["DRAFTHOUSE_JOB_STORE"] = own or job.store  # a node may see the fleet's store at another address
        launch = job.launch(epoch, self.node(node), secrets)
        return replace(launch, env={**launch.env, **identity})

    def runtime(self, of: Life | Job, node: str) -> Runtime:
        """The runtime of a life, or of a job to be, on a node."""
        return runtime_of(of.runtime, self.node(node))

    def proxy(self, job: Job) -> Proxy | None:
        """The proxy in front of a served job, spoken to on the node where its admin socket is."""
        if job.proxy is None:
            return None
        settings, connection = job.proxy, self.connect(job.proxy.node)

        def ask(command: str) -> str:
            return connection.script(_ASK, [settings.admin, command], timeout_s=20).stdout

        return Proxy(ask, settings.backend, f"{settings.node}: {settings.admin}")

    @contextmanager
    def locked(self, job: str, action: str) -> Iterator[None]:
        """Hold the job's lock: nobody else changes it meanwhile.

        Raises:
            StoreError: somebody holds it; says who, since when, and how to break it.
        """
        with self._lock(job).acquire(self.who, action):
            yield

    def break_lock(self, job: str, reason: str) -> Holder | None:
        """Take a lock away from a holder who is gone, and say whose it was; it is written down."""
        holder = self._lock(job).breaks(reason, self.who)
        self.note("unlock", job, reason=reason, holder=None if holder is None else holder.who)
        return holder

    def lock_holder(self, job: str) -> Holder | None:
        """Who holds the job's lock now."""
        return self._lock(job).holder()

    def _lock(self, job: str) -> Lock:
        return Lock(self._store, job, breaking=f"fab unlock --job {job} --reason '...'")

    def note(self, action: str, job: str, **facts: Any) -> None:
        """Append to the audit log: who, what, with which outcome. Never a secret's value."""
        self.journal.append({"who": self.who, "action": action, "job": job, **facts})


# A unix or TCP admin socket is reached on the proxy's own node: it need not be open to anybody else.
_ASK = """
import socket, sys
address, command = sys.argv[1:3]
if address.startswith("/"):
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(10)
    link.connect(address)
else:
    host, _, port = address.rpartition(":")
    link = socket.create_connection((host, int(port)), 10)
link.sendall(command.encode() + b"\\n")
while chunk := link.recv(65536):
    sys.stdout.write(chunk.decode(errors="replace"))
"""
