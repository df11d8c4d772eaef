"""Units as containers of the node's Docker Engine, by its command line.

Secrets are not given with `--env-file`: `docker inspect` would show them to everyone who may ask the engine. They are
in a file of mode 0600 that belongs to the container's user, in a folder that only root of the node can enter; the shell
script `enter`, which is the container's entry point, reads it. The same script keeps the engine from starting a unit
again whose job was moved elsewhere (exit status 76, or the file that a worker leaves below a launcher which ends with
another one): restart policies know no exit status but 0.

The container shares the node's network, and finds the job's folder at the path that it has on the node. `argv` follows
the image's entry point, as with `docker run`.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from drafthouse.errors import FleetError
from drafthouse.fleet.errors import CommandError
from drafthouse.fleet.runtime import images
from drafthouse.fleet.runtime.on_node import ask, failed, root_of
from drafthouse.fleet.runtime.protocol import FENCED, Launch, State, Stopped, UnitStatus, parse_unit
from drafthouse.progress import Progress

if TYPE_CHECKING:
    from drafthouse.fleet.connection import Answer, NodeConnection

BOX = "/run/drafthouse"
LOG_OPTIONS = ("--log-driver=json-file", "--log-opt=max-size=10m", "--log-opt=max-file=3")
# `wait` returns early when a trap ran; whether it did is asked with `told`. Only after the command's end is a second
# `wait` answered with 127.
ENTER = f"""\
#!/bin/sh
# enter exec WORD...            become a command with the unit's secrets
# enter on-failure|always|never WORD...   run the unit's command
. {BOX}/secrets
export DRAFTHOUSE_FENCED={BOX}/fenced
export TINI_SUBREAPER=1  # an image may bring an init of its own, which is not pid 1 here
policy=$1
shift
[ "$policy" != exec ] || exec "$@"
rm -f {BOX}/exit {BOX}/fenced
"$@" &
child=$!
trap 'told=1; kill -TERM "$child" 2>/dev/null' TERM INT
status= told=1
while [ -n "$told" ]; do
    told=
    wait "$child"
    found=$?
    [ "$found" = 127 ] && [ -n "$status" ] || status=$found
done
[ ! -e {BOX}/fenced ] || status={FENCED}
echo "$status" >{BOX}/exit
# The engine restarts whatever does not end with 0.
case "$policy $status" in
    *' {FENCED}') exit 0 ;;
    'always 0') exit 1 ;;
    *) exit "$status" ;;
esac
"""
_STATES: dict[str, State] = {"running": "running", "paused": "running", "restarting": "restarting"}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Docker:
    """The Docker runtime; `protocol.Runtime` says what the calls mean."""

    name = "docker"

    def present(self, node: NodeConnection, image: str) -> bool:
        """Whether the node has the image (`name@sha256:…` or `sha256:…`)."""
        return images.find(node, image) is not None

    def provide(
        self, node: NodeConnection, image: str, via: NodeConnection | None = None, progress: Progress | None = None
    ) -> None:
        """Bring an image to the node, see `images.provide`."""
        images.provide(node, image, via, progress)

    def start(self, node: NodeConnection, launch: Launch) -> None:
        if self.status(node, launch.unit).state in ("running", "restarting"):
            return
        found = None if launch.image is None else images.find(node, launch.image)
        if found is None:
            raise CommandError(
                f"the image {launch.image} is not on the node",
                exit=1,
                where=node.node.name,
                fix="bring it with `fab pull-image`",
            )
        node.run(["docker", "rm", "--force", launch.unit], check=False)
        folders = ask(node, "prepare", launch.unit, request=self._request(node, launch, found), again=True)
        words = ["docker", "run", "--detach", *options(launch, folders["job"], folders["box"])]
        argv = [f"{BOX}/enter", launch.restart, *found.entrypoint, *launch.argv]
        answer = node.run([*words, found.id, *argv], timeout_s=120, check=False)
        if answer.exit != 0:
            node.run(["docker", "rm", "--force", launch.unit], check=False)
            ask(node, "remove", launch.unit)  # the secrets
            raise failed(node, f"the engine does not start {launch.unit}", answer)

    def stop(self, node: NodeConnection, unit: str, grace_s: float) -> Stopped:
        began = time.monotonic()
        before = self.status(node, unit).state
        if before != "absent":
            node.run(["docker", "stop", f"--time={math.ceil(grace_s)}", unit], timeout_s=grace_s + 60)
            node.run(["docker", "update", "--restart=no", unit])  # for a start of the engine with another idea
        # Nobody needs them any more, whoever has taken the container away.
        node.run(["rm", "-f", self._box(node, unit, "secrets")])
        if before == "absent":
            return Stopped(unit, "absent", 0.0)
        if before == "exited":
            return Stopped(unit, "absent", 0.0)
        after = self._inspect(node, unit)[0]["State"]
        # `enter` leaves its word when it ends by itself.
        killed = after["ExitCode"] == 137 and self._exit(node, unit) is None
        return Stopped(unit, "kill" if killed else "term", round(time.monotonic() - began, 3))

    def status(self, node: NodeConnection, unit: str) -> UnitStatus:
        found = self._inspect(node, unit)
        return self._status(node, found[0]) if found else UnitStatus(unit, "absent", self.name)

    def units(self, node: NodeConnection) -> list[UnitStatus]:
        words = ["docker", "ps", "--all", "--filter=label=drafthouse.job", "--format={{.Names}}"]
        listed = node.run(words, check=False)
        if listed.exit == 127:
            return []  # a node without an engine has no containers
        if listed.exit != 0:
            raise failed(node, "docker ps", listed)
        names = [name for name in listed.stdout.split() if parse_unit(name)]
        return [self._status(node, one) for one in self._inspect(node, *sorted(names))]

    def logs(self, node: NodeConnection, unit: str, *, lines: int | None = None, follow: bool = False) -> Iterator[str]:
        how = [f"--tail={'all' if lines is None else lines}", *(["--follow"] if follow else [])]
        return node.stream(["docker", "logs", *how, unit])

    def exec(self, node: NodeConnection, unit: str, argv: Sequence[str], *, timeout_s: float = 60.0) -> Answer:
        words = ["docker", "exec", unit, "/bin/sh", f"{BOX}/enter", "exec", *argv]
        return node.run(words, timeout_s=timeout_s, check=False)

    def remove(self, node: NodeConnection, unit: str) -> None:
        state = self.status(node, unit).state
        if state in ("running", "restarting"):
            raise CommandError(f"{unit} still runs", exit=1, where=node.node.name, fix="stop it first")
        if state != "absent":
            node.run(["docker", "rm", unit])
        ask(node, "remove", unit)

    def _request(self, node: NodeConnection, launch: Launch, image: images.Image) -> dict[str, Any]:
        for name in launch.secrets:
            if not _NAME.fullmatch(name):
                raise FleetError(f"'{name}' cannot be the name of an environment variable", where=launch.unit)
        secrets = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in launch.secrets.items())
        return {
            "job": launch.job,
            "files": dict(launch.files),
            "ports": launch.ports,
            "owner": images.owner(node, image),
            "box": {"enter": ENTER, "secrets": secrets},
        }

    def _inspect(self, node: NodeConnection, *units: str) -> list[dict[str, Any]]:
        """What the engine says of containers; those that are not there are left out."""
        if not units:
            return []
        answer = node.run(["docker", "container", "inspect", *units], check=False)
        if answer.exit != 0 and "no such container" not in answer.stderr.lower():
            raise failed(node, "docker inspect", answer, images.ENGINE)
        return list(json.loads(answer.stdout or "[]"))

    def _box(self, node: NodeConnection, unit: str, name: str) -> str:
        return str(PurePosixPath(root_of(node), "units", unit, "box", name))

    def _exit(self, node: NodeConnection, unit: str) -> int | None:
        """The exit status that `enter` wrote down; None when it was killed."""
        text = node.read(self._box(node, unit, "exit")) or b""
        return int(text) if text.strip().isdigit() else None

    def _status(self, node: NodeConnection, container: dict[str, Any]) -> UnitStatus:
        unit, said = container["Name"].removeprefix("/"), container["State"]
        state = _STATES.get(said["Status"], "exited")
        written = self._exit(node, unit) if state != "running" else None
        return UnitStatus(
            unit,
            state,
            self.name,
            exit=None if state == "running" else said["ExitCode"] if written is None else written,
            restarts=container["RestartCount"],
            since=said["StartedAt"] if state == "running" else said["FinishedAt"],
            image=container["Image"],
            pid=said["Pid"] or None,
        )


def options(launch: Launch, job: str, box: str) -> list[str]:
    """Options of `docker run` up to the image."""
    retries = f":{launch.retries}" if launch.restart == "on-failure" and launch.retries else ""
    never = launch.restart == "never" or (launch.restart == "on-failure" and not launch.retries)
    gpus = launch.gpus if isinstance(launch.gpus, int) else _csv([f"device={','.join(launch.gpus)}"])
    env = {"DRAFTHOUSE_JOB": launch.job, "DRAFTHOUSE_EPOCH": str(launch.epoch), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if not launch.gpus:
        # Where NVIDIA's runtime is the engine's default, images that ask for all GPUs would get them.
        env["NVIDIA_VISIBLE_DEVICES"] = "void"
    labels = {**launch.labels, "job": launch.job, "epoch": str(launch.epoch)}
    mounts = {job: job, box: BOX, **launch.mounts}
    return [
        f"--name={launch.unit}",
        "--pull=never",
        "--init",
        "--network=host",
        "--stop-signal=SIGTERM",
        "--restart=no" if never else f"--restart=on-failure{retries}",
        f"--workdir={launch.workdir or job}",
        *LOG_OPTIONS,
        *([f"--gpus={gpus}"] if launch.gpus else []),
        *(["--ipc=host"] if launch.shm_gib is None else [f"--shm-size={round(launch.shm_gib * 2**30)}"]),
        *(f"--label=drafthouse.{name}={value}" for name, value in labels.items()),
        *(f"--env={name}={value}" for name, value in {**env, **launch.env}.items()),
        *(f"--mount={_mount(source, target)}" for source, target in mounts.items()),
        "--entrypoint=/bin/sh",
    ]


def _mount(source: str, target: str) -> str:
    """Not `--volume`, which makes an empty folder of a source that is not there."""
    path = target.removesuffix(":ro")
    return _csv(["type=bind", f"source={source}", f"target={path}", *(["readonly"] if path != target else [])])


def _csv(fields: list[str]) -> str:
    """As the engine's client reads `--mount` and `--gpus`: a comma inside a field needs quotes."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()
