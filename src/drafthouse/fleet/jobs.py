"""Job files, `inventory/jobs/*.yml`: what runs, where, with what, and how it shows that it works."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from drafthouse.config import Settings, load, validate
from drafthouse.errors import ConfigError, FleetError
from drafthouse.fleet.inventory import Inventory
from drafthouse.fleet.job_values import (
    AbsolutePath,
    GateSettings,
    Gpus,
    Image,
    JobName,
    MountTarget,
    Needs,
    NodeName,
    PlainName,
    Port,
    ProxySettings,
    RelativePath,
    Restart,
    Text,
    Url,
    VariableName,
    Words,
)
from drafthouse.fleet.node import Node
from drafthouse.fleet.runtime.protocol import Launch
from drafthouse.serve.launch import launch_line
from drafthouse.serve.load import load_profile
from drafthouse.serve.profile import Profile

MAX_FILE = 1 << 20
_RESOLVED = ("contents", "profile_values")


class Job(Settings):
    """One job. `load` makes it whole: the contents of its files and its profile become part of it, so that a job that
    was kept can be started again as it was, whatever the inventory says by then."""

    name: JobName = Field(description="as the file is called")
    kind: Literal["extract", "train", "serve", "command"]
    node: NodeName | None = Field(None, description="where it goes when nothing else is said")
    image: Image | None = Field(None, description="container image by digest, or id of one that was built locally")
    venv: AbsolutePath | None = Field(None, description="virtual environment on the node, of a job without a container")
    command: Words = Field((), description="program and arguments as a list; no shell reads them")
    profile: PlainName | None = Field(None, description="serve: name under inventory/profiles; gives the command")
    host: PlainName | None = Field(None, description="serve: address that it listens on; none: the profile's")
    port: Port | None = Field(None, description="serve: port that it listens on; none: the profile's")
    proxy: ProxySettings | None = Field(None, description="serve: the proxy in front of it")
    gpus: Gpus = Field(0, description="how many, or a list of indices or UUIDs")
    mounts: dict[AbsolutePath, MountTarget] = Field(
        default_factory=dict, description="folder on the node -> path in the container, ':ro' appended: read-only"
    )
    env: dict[VariableName, Text] = Field(default_factory=dict, description="values that anybody may see")
    secrets: tuple[VariableName, ...] = Field((), description="names; values come from the operator's environment")
    files: dict[RelativePath, RelativePath] = Field(
        default_factory=dict, description="path in the job's folder -> file in the inventory folder; nothing secret"
    )
    store: Url | None = Field(None, description="where its work is kept; left out: the fleet's; null: nowhere")
    run: PlainName = Field("states", description="extract: name of the run on the store")
    recipe: PlainName | None = Field(None, description="train: name of the recipe, under which the drafter is kept")
    needs: Needs = Field(default_factory=Needs)
    gate: GateSettings = Field(default_factory=GateSettings)
    stop_grace_s: float = Field(60.0, ge=0, description="seconds between SIGTERM and SIGKILL")
    restart: Restart = Field("on-failure", description="what happens when it ends by itself")
    retries: int = Field(5, ge=0, description="how often it is started again after a failure")
    shm_gib: float | None = Field(None, gt=0, description="/dev/shm of the container; none: the node's")
    workdir: AbsolutePath | None = Field(None, description="folder that it runs in; none: the job's folder")
    contents: dict[RelativePath, Text] = Field(default_factory=dict, description="filled in from `files`", repr=False)
    profile_values: dict[str, Any] | None = Field(None, description="filled in from `profile`", repr=False)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.image is None) == (self.venv is None):
            raise ValueError("exactly one of 'image' (a container) and 'venv' (a process) says where it runs")
        if self.venv is not None and (self.mounts or self.shm_gib is not None):
            raise ValueError("'mounts' and 'shm_gib' are for containers; with 'venv' the job sees the node's own")
        if self.kind == "serve":
            if self.profile is None or self.command:
                raise ValueError("a job of kind serve has a 'profile', which gives the command, and no 'command'")
        else:
            alien = [key for key in ("profile", "host", "port", "proxy") if getattr(self, key) is not None]
            if alien:
                raise ValueError(f"'{alien[0]}' is for jobs of kind serve")
            if not self.command or not self.command[0]:
                raise ValueError("'command' is missing: give program and arguments as a list")
        if (self.recipe is not None) != (self.kind == "train"):
            raise ValueError("jobs of kind train have a 'recipe', and no others")
        twice = sorted(self.env.keys() & set(self.secrets))
        if twice:
            raise ValueError(f"'{twice[0]}' stands in 'env' and in 'secrets'")
        return self

    @classmethod
    def load(cls, path: Path, inventory: Inventory) -> Job:
        """Read a job file and what it refers to.

        Raises:
            FleetError: one sentence with the file and the path of the key.
        """
        where = str(path)
        try:
            job = load(cls, path)
            given = [key for key in _RESOLVED if key in job.model_fields_set]
            if given:
                raise ConfigError(f"unknown key '{given[0]}'", where=where, fix="correct that key")
            values = job.model_dump(mode="json") | job._resolved(inventory, where)
            whole = validate(cls, values, where)
        except ConfigError as error:
            # The path of a key holds what stands in the file, also a line break.
            raise FleetError(" ".join(error.what.split()), where=error.where, fix=error.fix) from None
        whole._check_place(inventory, path)
        return whole

    def _resolved(self, inventory: Inventory, where: str) -> dict[str, Any]:
        found: dict[str, Any] = {
            "contents": {name: _content(inventory.path, file, where) for name, file in self.files.items()}
        }
        if "store" not in self.model_fields_set:
            found["store"] = inventory.fleet_store
        if self.profile is not None:
            profile = load_profile(self.profile, folder=inventory.path / "profiles")
            launch_line(profile)  # so that a flag that no release knows is told here and not on the node
            found["profile_values"] = profile.model_dump(mode="json")
        return found

    def _check_place(self, inventory: Inventory, path: Path) -> None:
        where = str(path)
        if self.name != path.stem:
            raise FleetError(f"'name': the job calls itself '{self.name}'", where=where, fix=f"name it '{path.stem}'")
        if self.kind in {"extract", "train"} and self.store is None:
            raise FleetError(
                f"'store': a job of kind {self.kind} keeps its work on a store",
                where=where,
                fix="set it here, or `fleet_store` in group_vars/all.yml",
            )
        named = {"node": [self.node] if self.node else [], "needs.peers": list(self.needs.peers)}
        if self.proxy is not None:
            named |= {"proxy.node": [self.proxy.node], "proxy.servers": list(self.proxy.servers)}
        for key, nodes in named.items():
            for node in nodes:
                try:
                    inventory.node(node)
                except FleetError as error:
                    raise FleetError(f"'{key}': {error.what}", where=where, fix=error.fix) from None

    @property
    def runtime(self) -> Literal["docker", "process"]:
        """What runs it."""
        return "process" if self.image is None else "docker"

    def secret_values(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Values of its secrets.

        Raises:
            FleetError: some are not in the environment; all of them are named.
        """
        missing = [name for name in self.secrets if not environment.get(name)]
        if missing:
            raise FleetError(
                f"no value for {', '.join(missing)}",
                where=f"job {self.name}, secrets",
                fix="set it in the environment of this command",
            )
        return {name: environment[name] for name in self.secrets}

    def serving_profile(self) -> Profile:
        """The profile of a job of kind serve, with the job's own host and port.

        Raises:
            FleetError: the job serves nothing.
        """
        if self.profile_values is None:
            raise FleetError(f"a job of kind {self.kind} has no profile", where=f"job {self.name}", fix="ask another")
        own = {key: value for key, value in (("host", self.host), ("port", self.port)) if value is not None}
        return Profile.model_validate(self.profile_values | own)

    def serving_port(self) -> int:
        """The port that a job of kind serve listens on."""
        return self.serving_profile().port

    def launch(self, epoch: int, node: Node, secrets: Mapping[str, str]) -> Launch:
        """What a runtime starts as life `epoch` on `node`.

        Raises:
            FleetError: it wants more GPUs than the inventory gives that node.
        """
        wanted = self.gpus if isinstance(self.gpus, int) else len(self.gpus)
        if node.gpu_count is not None and wanted > node.gpu_count:
            raise FleetError(
                f"'gpus': it wants {wanted} and {node.name} has {node.gpu_count}",
                where=f"job {self.name}",
                fix="choose another node, or correct the inventory",
            )
        argv, env = self.command, dict(self.env)
        ports: tuple[int, ...] = ()
        if self.kind == "serve":
            profile = self.serving_profile()
            line = launch_line(profile)
            argv, env, ports = line.argv, line.env | env, (profile.port,)
        return Launch(
            job=self.name,
            epoch=epoch,
            argv=argv,
            env=env,
            secrets={name: secrets[name] for name in self.secrets},
            files=self.contents,
            image=self.image,
            venv=self.venv,
            gpus=self.gpus,
            mounts=self.mounts,
            grace_s=self.stop_grace_s,
            restart=self.restart,
            retries=self.retries,
            workdir=self.workdir,
            ports=ports,
            shm_gib=self.shm_gib,
            labels={"kind": self.kind, "digest": self.digest()},
        )


def jobs(inventory: Inventory) -> dict[str, Job]:
    """All jobs of the inventory by name.

    Raises:
        FleetError: the first file that is wrong.
    """
    files = sorted((inventory.path / "jobs").glob("*.yml"))
    return {file.stem: Job.load(file, inventory) for file in files}


def _content(folder: Path, name: str, where: str) -> str:
    """Text of a file that a job brings along; it lies in the inventory folder, also when it is a link."""
    file, fix = folder / name, "correct the path, which is relative to the inventory folder"
    if not file.resolve().is_relative_to(folder.resolve()):
        raise FleetError(f"'files': {name} lies outside of {folder}", where=where, fix=fix)
    try:
        if file.stat().st_size > MAX_FILE:
            raise FleetError(
                f"'files': {name} is larger than {MAX_FILE >> 20} MiB", where=where, fix="put it onto the store"
            )
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise FleetError(f"'files': {name} cannot be read ({error.strerror})", where=where, fix=fix) from None
    except ValueError:
        raise FleetError(f"'files': {name} is not text (UTF-8)", where=where, fix="put it onto the store") from None
