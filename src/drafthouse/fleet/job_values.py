"""Values in job files. Names are refused by their alphabet; free text is carried as it is, never through a shell."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

from drafthouse.config import Settings
from drafthouse.fleet.inventory import NODE_NAME

_DIGEST = re.compile(r"([A-Za-z0-9][A-Za-z0-9._:/-]*@)?sha256:[0-9a-f]{64}")
_GPU = re.compile(r"[0-9]{1,3}|(GPU|MIG)-[0-9A-Za-z/-]{1,80}")
MAX_GPUS = 64
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def _image(value: str) -> str:
    if not _DIGEST.fullmatch(value):
        raise ValueError(
            f"'{_CONTROL.sub('?', value)}' names no digest, and a tag can move; ask for it with"
            " `docker image inspect --format '{{index .RepoDigests 0}}' IMAGE` (an image that was built here and never"
            " pushed: `--format '{{.Id}}'`) and write NAME@sha256:… or sha256:…"
        )
    return value


def _text(value: str) -> str:
    if "\0" in value:
        raise ValueError("holds a NUL, which no argument or variable can")
    return value


def _words(value: object) -> object:
    if isinstance(value, str):
        raise ValueError("is a text, and no shell is there to take it apart; write it as a list of words")
    return value


def _absolute(value: str) -> str:
    if not value.startswith("/") or ".." in value.split("/") or _CONTROL.search(value):
        raise ValueError(f"'{_CONTROL.sub('?', value)}' is no absolute path without '..' and control characters")
    return value


def _relative(value: str) -> str:
    parts = value.split("/")
    if not value or _CONTROL.search(value) or any(part in {"", ".", ".."} for part in parts):
        raise ValueError(f"'{_CONTROL.sub('?', value)}' is no relative path without '..' and control characters")
    return value


def _target(value: str) -> str:
    path = _absolute(value.removesuffix(":ro"))
    if ":" in path:
        raise ValueError(f"'{value}' may only end in ':ro'")
    return value


def _url(value: str) -> str:
    if re.search(r"[\s\x00-\x1f\x7f]", value) or not value:
        raise ValueError("is no URL: it is empty or holds spaces or control characters")
    if "@" in urlsplit(value).netloc:
        raise ValueError("holds credentials; they belong into `secrets`")
    return value


def _own_name(value: str) -> str:
    if value.startswith("DRAFTHOUSE_"):
        raise ValueError(f"'{value}' is set by the fleet itself")
    return value


def _gpus(value: object) -> object:
    """A number of GPUs, or which ones: a tuple of texts."""
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value <= MAX_GPUS:
            raise ValueError(f"{value} is no number of GPUs from 0 to {MAX_GPUS}")
        return value
    if not isinstance(value, (list, tuple)):
        raise ValueError("is neither a number of GPUs nor a list of indices or UUIDs")
    names = tuple(str(one) if not isinstance(one, bool) else "" for one in value)
    wrong = [name for name in names if not _GPU.fullmatch(name)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is neither the index nor the UUID of a GPU")
    if len(set(names)) != len(names):
        raise ValueError("names one GPU twice")
    return names


JobName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}\z")]
NodeName = Annotated[str, StringConstraints(pattern=rf"^{NODE_NAME}\z")]
PlainName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\z")]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}\z"), AfterValidator(_own_name)]
Version = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+){0,3}\z")]
Gpus = Annotated[int | tuple[str, ...], BeforeValidator(_gpus)]
Image = Annotated[str, AfterValidator(_image)]
Text = Annotated[str, AfterValidator(_text)]
Words = Annotated[tuple[Text, ...], BeforeValidator(_words)]
AbsolutePath = Annotated[str, AfterValidator(_absolute)]
RelativePath = Annotated[str, AfterValidator(_relative)]
MountTarget = Annotated[str, AfterValidator(_target)]
Url = Annotated[str, AfterValidator(_url)]
AdminSocket = Annotated[str, StringConstraints(pattern=r"^(/[A-Za-z0-9._/-]+|[A-Za-z0-9.-]+:[0-9]{1,5})\z")]
Port = Annotated[int, Field(ge=1, le=65535)]


class Needs(Settings):
    """What a node must have before a job may go there; versions are the least."""

    disk_gib: float | None = Field(None, gt=0, description="free where the job's folder is")
    shm_gib: float | None = Field(None, gt=0, description="size of /dev/shm")
    memory_gib: float | None = Field(None, gt=0, description="free main memory")
    gpu_memory_gib: float | None = Field(None, gt=0, description="of every GPU that it gets")
    driver: Version | None = Field(None, description="NVIDIA driver, such as '580.65'; quote it")
    cuda: Version | None = Field(None, description="CUDA version of the driver, such as '12.8'; quote it")
    python: Version | None = Field(None, description="python3 on the node, such as '3.11'; quote it")
    engine: Version | None = Field(None, description="Docker Engine, such as '24.0'; quote it")
    peers: dict[NodeName, Port] = Field(default_factory=dict, description="nodes that it must reach, and on which port")


class GateSettings(Settings):
    """How long a new life may take to show that it works."""

    timeout_s: float = Field(1800.0, gt=0, description="until it is given up and the old one goes on")
    poll_s: float = Field(2.0, gt=0, description="between two looks")
    runs_s: float = Field(
        10.0, ge=0, description="command: how long it must have run, when it does not end well before"
    )


class ProxySettings(Settings):
    """The HAProxy in front of a served model: which server of which backend is which node."""

    node: NodeName = Field(description="where its admin socket is")
    admin: AdminSocket = Field(description="the admin socket there: a path, or host:port")
    backend: PlainName = Field(description="name of the backend in its configuration")
    servers: dict[NodeName, PlainName] = Field(min_length=1, description="node -> name of its server in the backend")


Restart = Literal["never", "on-failure", "always"]
