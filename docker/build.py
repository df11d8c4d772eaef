#!/usr/bin/env python3
"""Build images of docker/images.yml with any Docker client that has BuildKit; an image comes after those it stands on.

python docker/build.py train-cpu
CA_BUNDLE=/etc/ssl/certs/ca-certificates.crt python docker/build.py serve
python docker/build.py base-cpu --arg PYTHON_IMAGE=debian-python:local --arg TORCH_INDEX=
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

LIST = Path(__file__).with_name("images.yml")
_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


@dataclass(frozen=True)
class Image:
    """One entry of the list.

    Attributes:
        name: of the entry.
        tag: the image's name and version.
        context: absolute folder of the build.
        dockerfile: absolute path.
        args: build arguments.
        secrets: file by secret; those whose file is empty or not there are left out.
        needs: entries that are built before.
    """

    name: str
    tag: str
    context: Path
    dockerfile: Path
    args: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Path] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    @property
    def declared(self) -> set[str]:
        """Build arguments that the Dockerfile has."""
        return set(re.findall(r"^ARG (\w+)", self.dockerfile.read_text(encoding="utf-8"), re.MULTILINE))

    def command(self, docker: str, args: Mapping[str, str], target: str | None = None) -> list[str]:
        """The `docker build …` of this image; `args` win over those of the list, as far as its Dockerfile has them."""
        values = {**self.args, **{key: value for key, value in args.items() if key in self.declared}}
        words = [docker, "build", "--file", str(self.dockerfile), "--tag", self.tag]
        words += [word for key, value in values.items() for word in ("--build-arg", f"{key}={value}")]
        words += [word for name, file in self.secrets.items() for word in ("--secret", f"id={name},src={file}")]
        words += ["--target", target] if target else []
        return [*words, str(self.context)]


def read(path: Path = LIST, environment: Mapping[str, str] = os.environ) -> dict[str, Image]:
    """The list, with `${NAME:-default}` filled in from the environment.

    Raises:
        SystemExit: a file is given as a secret and is not there.
    """
    text = _VARIABLE.sub(lambda match: environment.get(match[1]) or match[2], path.read_text(encoding="utf-8"))
    document = yaml.safe_load(text)
    files = {name: Path(entry["file"]) for name, entry in document["secrets"].items()}
    for name, file in files.items():
        if not file.exists():
            raise SystemExit(f"error: {file}: there is no such file; correct {name.upper()} or leave it out")
    files = {name: file for name, file in files.items() if file.is_file()}
    return {name: _image(name, entry, path.parent.resolve(), files) for name, entry in document["services"].items()}


def _image(name: str, entry: Mapping[str, Any], folder: Path, files: Mapping[str, Path]) -> Image:
    build = entry["build"]
    context = (folder / build["context"]).resolve()
    return Image(
        name=name,
        tag=entry["image"],
        context=context,
        dockerfile=context / build.get("dockerfile", "Dockerfile"),
        args=build["args"],
        secrets={secret: files[secret] for secret in build.get("secrets", ()) if secret in files},
        needs=tuple(other.removeprefix("service:") for other in build.get("additional_contexts", {}).values()),
    )


def in_order(images: Mapping[str, Image], names: Sequence[str]) -> list[Image]:
    """The named images and all that they stand on, those first.

    Raises:
        SystemExit: there is no image of a name.
    """
    found: dict[str, Image] = {}

    def add(name: str) -> None:
        if name not in images:
            raise SystemExit(f"error: there is no image '{name}'; use one of {', '.join(images)}")
        for needed in images[name].needs:
            add(needed)
        found[name] = images[name]

    for name in names:
        add(name)
    return list(found.values())


def clients(environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Every `docker` on PATH."""
    for folder in environment.get("PATH", "").split(os.pathsep):
        program = Path(folder) / "docker"
        if program.is_file() and os.access(program, os.X_OK):
            yield str(program)


def buildkit_client() -> str:
    """The first Docker client that builds with BuildKit: one of before 23, or one with the buildx plug-in.

    Raises:
        SystemExit: there is none.
    """
    for client in clients():
        asked = subprocess.run(
            [client, "build", "--help"], env={**os.environ, "DOCKER_BUILDKIT": "1"}, capture_output=True, text=True
        )
        if asked.returncode == 0 and "--secret" in asked.stdout:
            return client
    raise SystemExit("error: no docker on PATH builds with BuildKit; install the buildx plug-in of your Docker client")


def main(words: Sequence[str] | None = None) -> None:
    """Build, or print what would be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help="entry of images.yml")
    parser.add_argument("--arg", action="append", default=[], metavar="KEY=VALUE", help="a build argument")
    parser.add_argument("--target", help="stage to stop at, of the images named (not of those they stand on)")
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    options = parser.parse_args(words)
    wrong = [one for one in options.arg if "=" not in one]
    if wrong:
        raise SystemExit(f"error: --arg '{wrong[0]}' has no value; write KEY=VALUE")
    args = dict(one.split("=", 1) for one in options.arg)
    images = in_order(read(), options.names)
    unknown = sorted(args.keys() - set().union(*(image.declared for image in images)))
    if unknown:
        raise SystemExit(f"error: no Dockerfile of {', '.join(options.names)} has an argument '{unknown[0]}'")
    client = "docker" if options.dry_run else buildkit_client()
    for image in images:
        command = image.command(client, args, options.target if image.name in options.names else None)
        print(shlex.join(command), file=sys.stdout if options.dry_run else sys.stderr, flush=True)
        if options.dry_run:
            continue
        done = subprocess.run(command, env={**os.environ, "DOCKER_BUILDKIT": "1"}, check=False)
        if done.returncode != 0:
            raise SystemExit(f"error: {image.tag} could not be built; the reason stands above")


if __name__ == "__main__":
    main()
