"""Images on nodes: always by digest, pulled where a registry answers, else carried over ssh.

An image that was carried (`docker save | docker load`) has lost the name under which its registry knows it; it is
tagged with the digest in `CARRIED`, after its id was compared with the source's.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drafthouse.fleet.errors import CommandError
from drafthouse.fleet.openssh import ssh
from drafthouse.fleet.runtime.on_node import failed
from drafthouse.progress import Progress, Silent

if TYPE_CHECKING:
    from drafthouse.fleet.connection import NodeConnection

CARRIED = "drafthouse-carried"
PULL_S = 3600.0
ENGINE = "a Docker Engine (role container_engine)"


@dataclass(frozen=True)
class Image:
    """An image of an engine: its id, its size in bytes, its own entry point and user ("" for root)."""

    id: str
    size: int
    entrypoint: tuple[str, ...]
    user: str


def names(image: str) -> list[str]:
    """Under which an engine may have `image`: as it was pulled, and as it was carried."""
    digest = image.partition("@sha256:")[2]
    return [image, f"{CARRIED}:{digest}"] if digest else [image]


def find(node: NodeConnection, image: str) -> Image | None:
    """The image on the node; None when it has none."""
    for name in names(image):
        answer = node.run(["docker", "image", "inspect", name], check=False)
        if answer.exit == 0:
            return _image(answer.stdout)
        if "no such image" not in answer.stderr.lower():
            raise failed(node, "docker image inspect", answer, ENGINE)
    return None


def owner(node: NodeConnection, image: Image) -> int:
    """Numeric id of the user that containers of the image run as."""
    user = image.user.partition(":")[0]
    if user in ("", "root"):
        return 0
    if user.isdigit():
        return int(user)
    words = ["docker", "run", "--rm", "--pull=never", "--network=none", "--entrypoint=id", image.id, "-u", user]
    answer = node.run(words, check=False)
    if answer.exit != 0 or not answer.stdout.strip().isdigit():
        raise failed(node, f"the id of the image's user '{user}' cannot be told", answer)
    return int(answer.stdout)


def provide(
    node: NodeConnection, image: str, via: NodeConnection | None = None, progress: Progress | None = None
) -> None:
    """Bring `image` to the node's engine.

    Args:
        image: `name@sha256:…`, or an image's id `sha256:…`, which no registry knows.
        via: a node to take it from; None: pulled, or else taken from the engine of this machine.

    Raises:
        CommandError: it can be had nowhere, or what arrived is another image.
    """
    if find(node, image) is not None:
        return
    progress = progress or Silent()
    reason = f"{via.node.name} has no such image" if via is not None else "the engine of this machine has no such image"
    if via is None and "@" in image:
        with progress.task(f"pull to {node.node.name}", None):
            pulled = node.run(["docker", "pull", "--quiet", image], timeout_s=PULL_S, check=False)
        if pulled.exit == 0:
            return
        reason = f"the registry does not give it ({' '.join(pulled.stderr.split())}) and {reason}"
    source = find(via, image) if via is not None else _here(image)
    if source is None:
        raise CommandError(
            f"the image {image} cannot be had: {reason}",
            exit=1,
            where=node.node.name,
            fix="push it to a registry, or build or pull it where this command runs",
        )
    _carry(node, source, via, progress)
    arrived = find(node, source.id)
    if arrived is None or arrived.id != source.id:
        raise CommandError(
            f"another image arrived than {source.id}",
            exit=1,
            where=node.node.name,
            fix="engines that keep images in containerd name them by other digests: use one kind on all nodes",
        )
    for name in names(image)[1:]:
        node.run(["docker", "tag", source.id, name])


def _carry(node: NodeConnection, image: Image, via: NodeConnection | None, progress: Progress) -> None:
    save = ["docker", "save", image.id]
    if via is None:
        return _load(node, image, save, progress)
    with ssh(via.node, via.known_hosts) as words:
        return _load(node, image, [*words, "-l", via.node.user, "--", via.node.host, shlex.join(save)], progress)


def _load(node: NodeConnection, image: Image, save: list[str], progress: Progress) -> None:
    load = ["docker", "load", "--quiet"]
    name = f"image to {node.node.name}"
    node.pipe(save, load, progress=progress, description=name, total_bytes=float(image.size))


def _here(image: str) -> Image | None:
    """The image of the engine on this machine; None without one."""
    for name in names(image):
        try:
            done = subprocess.run(
                ["docker", "image", "inspect", name], capture_output=True, text=True, timeout=60, check=False
            )
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return None
        if done.returncode == 0:
            return _image(done.stdout)
    return None


def _image(inspected: str) -> Image:
    found: dict[str, Any] = json.loads(inspected)[0]
    config = found["Config"] or {}
    return Image(found["Id"], int(found["Size"]), tuple(config.get("Entrypoint") or ()), config.get("User") or "")
