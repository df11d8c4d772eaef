"""Model files on a host: what a manifest promises, what lies on the disk, and how the difference is fetched.

A model is a folder `<root>/<name>/<revision>` with a record of what was verified in it. A file gets its place only
after its sha256 has been compared; until then it grows in `.partial/`, where a killed download is taken up again. A
file with a wrong hash moves to `.quarantine/`, so that it can be looked at and is never loaded.

Transfers are curl's: it resumes (`--continue-at`), notices a stall (`--speed-limit`, `--speed-time`) and signs S3
requests (`--aws-sigv4`). See https://curl.se/docs/manpage.html.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from .apply import Handler, Undo
from .steps import ApplyError, Plan, Refusal, Step
from .world import World

RECORD = ".verified.json"
PARTIAL = ".partial"
QUARANTINE = ".quarantine"
_CHUNK = 8 << 20
#: curl exit codes after which another attempt, from where the last one ended, can succeed.
_TRANSIENT = {5, 6, 7, 16, 18, 28, 35, 52, 55, 56, 92}
_RANGE_IGNORED = 33


@dataclass(frozen=True)
class ModelFile:
    """One file of a model: relative path, size (bytes), sha256 (hex)."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class ModelDesired:
    """A model that should lie on the host.

    Attributes:
        root: folder of the model store.
        name, revision: where it lies below the root.
        source: `https://…` or `http://…` (base address), `s3://bucket/prefix`, or a folder of the host.
        files: the manifest.
        endpoint, region: of the S3 service.
        access_key, secret_key: of the S3 service; both empty for an open bucket.
        token: bearer token for http sources.
        stall_bytes_per_s, stall_s: a transfer slower than this for so long is broken off and taken up again.
        attempts: attempts in a row that brought no new byte before giving up.
        keep_free: bytes that must stay free on the disk.
        rehash: read every file again, even those that the record vouches for.
        absent: the model is to be removed.
    """

    root: str
    name: str
    revision: str
    source: str = ""
    files: tuple[ModelFile, ...] = ()
    endpoint: str = "https://s3.amazonaws.com"
    region: str = "us-east-1"
    access_key: str = ""
    secret_key: str = ""
    token: str = ""
    stall_bytes_per_s: int = 50_000
    stall_s: int = 30
    attempts: int = 5
    keep_free: int = 10 << 30
    rehash: bool = False
    absent: bool = False

    @property
    def folder(self) -> str:
        return os.path.join(self.root, self.name, self.revision)

    def url(self, file: ModelFile) -> str:
        """Address of a file at an http or S3 source (path style, which every S3 service understands)."""
        base = self.source.rstrip("/")
        if base.startswith("s3://"):
            base = f"{self.endpoint.rstrip('/')}/{base[len('s3://') :]}"
        return f"{base}/{quote(file.path)}"


@dataclass(frozen=True)
class Found:
    """A file as it lies on the disk; `sha256` is None when it was not read."""

    size: int
    mtime_ns: int
    sha256: str | None


@dataclass
class ModelFacts:
    """What a host has of one model.

    Attributes:
        present: the model has a folder, whatever is in it.
        files: relative path -> what lies there.
        partial: relative path -> bytes of a download that was broken off.
        free: free bytes of the disk that the store is on.
        curl: version of curl, empty when there is none.
        source_files: for a folder as source, the sizes of the files that it holds.
        record: the record of verified files as it should be written for `files`.
        recorded: the record as it is.
    """

    present: bool = False
    files: dict[str, Found] = field(default_factory=dict)
    partial: dict[str, int] = field(default_factory=dict)
    free: int = 0
    curl: str = ""
    source_files: dict[str, int] = field(default_factory=dict)
    record: str = ""
    recorded: str | None = None


def parse_manifest(text: str, where: str) -> tuple[ModelFile, ...]:
    """A manifest: lines `<sha256> <size in bytes> <path>`; `#` begins a comment.

    Raises:
        ValueError: a line that is none of these, a path that leaves the folder, or a path that stands twice.
    """
    files: dict[str, ModelFile] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        words = line.split(None, 2)
        if len(words) != 3 or len(words[0]) != 64 or not words[1].isdigit():
            raise ValueError(f"{where}:{number}: not `<sha256> <size in bytes> <path>`; write it with make_manifest")
        try:
            int(words[0], 16)
        except ValueError:
            raise ValueError(f"{where}:{number}: {words[0]!r} is no sha256") from None
        path = words[2].strip()
        parts = path.split("/")
        if path.startswith("/") or any(part in ("", ".", "..") for part in parts) or parts[0] in (PARTIAL, QUARANTINE):
            raise ValueError(f"{where}:{number}: the path {path!r} leaves the model's folder or hides in it")
        if path in files:
            raise ValueError(f"{where}:{number}: {path!r} stands twice")
        files[path] = ModelFile(path, int(words[1]), words[0].lower())
    if not files:
        raise ValueError(f"{where}: the manifest names no file")
    return tuple(files.values())


def sha256_of(path: str) -> str:
    """sha256 (hex) of a file, in constant memory."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(_CHUNK), b""):
            digest.update(block)
    return digest.hexdigest()


def look(world: World, desired: ModelDesired) -> ModelFacts:
    """Read what the host has. Files that the record vouches for (same size and time) are not read again."""
    facts = ModelFacts(present=world.exists(desired.folder))
    recorded = world.read(f"{desired.folder}/{RECORD}")
    facts.recorded = recorded
    vouched = _record_of(recorded)
    for file in desired.files:
        found = _status(world.path(f"{desired.folder}/{file.path}"))
        if found is not None:
            size, mtime_ns = found
            known = vouched.get(file.path, {})
            trusted = not desired.rehash and known.get("size") == size and known.get("mtime_ns") == mtime_ns
            digest = known.get("sha256") if trusted else None
            if digest is None and size == file.size:
                digest = sha256_of(world.path(f"{desired.folder}/{file.path}"))
            facts.files[file.path] = Found(size, mtime_ns, digest)
        partial = _status(world.path(f"{desired.folder}/{PARTIAL}/{file.path}"))
        if partial is not None:
            facts.partial[file.path] = partial[0]
        if desired.source.startswith("/"):
            source = _status(world.path(f"{desired.source}/{file.path}"))
            if source is not None:
                facts.source_files[file.path] = source[0]
    good = {f.path: facts.files[f.path] for f in desired.files if _is_good(f, facts)}
    facts.record = json.dumps(
        {path: {"size": f.size, "mtime_ns": f.mtime_ns, "sha256": f.sha256} for path, f in sorted(good.items())},
        indent=1,
    )
    disk = desired.root
    while not world.exists(disk) and disk != "/":
        disk = os.path.dirname(disk)
    facts.free = shutil.disk_usage(world.path(disk)).free
    version = world.run(["curl", "--version"])
    facts.curl = version.out.split()[1] if version.ok else ""
    return facts


def plan(facts: ModelFacts, desired: ModelDesired) -> Plan:
    """What to fetch, what to quarantine; refuses before the first byte what cannot end well."""
    made = Plan()
    if desired.absent:
        if facts.present:
            made.steps.append(Step("remove-model", desired.folder, "the inventory no longer lists this model"))
        return made
    missing = [file for file in desired.files if not _is_good(file, facts)]
    for file in missing:
        there = facts.files.get(file.path)
        if there is not None:
            made.steps.append(
                Step("quarantine", f"{desired.folder}/{file.path}", _complaint(file, there), {"path": file.path})
            )
    for file in missing:
        done = min(facts.partial.get(file.path, 0), file.size)
        made.steps.append(
            Step(
                "fetch",
                f"{desired.folder}/{file.path}",
                f"{file.size - done} of {file.size} bytes are missing",
                {"path": file.path},
            )
        )
    if missing or facts.recorded != facts.record:
        made.steps.append(
            Step("record", f"{desired.folder}/{RECORD}", "verified files are not read again while they are unchanged")
        )
    made.refusals += _refusals(facts, desired, missing)
    return made


def _refusals(facts: ModelFacts, desired: ModelDesired, missing: list[ModelFile]) -> Iterable[Refusal]:
    if not missing:
        return
    needed = sum(file.size - min(facts.partial.get(file.path, 0), file.size) for file in missing)
    if facts.free - needed < desired.keep_free:
        yield Refusal(
            "no-space",
            f"{_gb(needed)} are missing of {desired.name} and {_gb(facts.free)} are free, of which "
            f"{_gb(desired.keep_free)} must stay free",
            desired.root,
            "free the disk, point model_store_folder to a larger one, or lower model_store_keep_free",
        )
    if desired.source.startswith("/"):
        gone = [file.path for file in missing if facts.source_files.get(file.path) != file.size]
        if gone:
            yield Refusal(
                "source-incomplete",
                f"{len(gone)} of {len(missing)} files are not there or of another size, first {gone[0]}",
                desired.source,
                "complete the folder, or correct the manifest",
            )
    elif urlsplit(desired.source).scheme not in ("http", "https", "s3"):
        yield Refusal(
            "unknown-source",
            f"{desired.source!r} is no source",
            f"model {desired.name}",
            "give an https:// address, s3://bucket/prefix or the absolute path of a folder",
        )
    elif not facts.curl:
        yield Refusal("no-curl", "curl is not installed", "host", "install the package curl")


def handlers(desired: ModelDesired) -> dict[str, Handler]:
    """How the steps of `plan` are taken."""
    files = {file.path: file for file in desired.files}

    def quarantine(step: Step, world: World) -> Undo | None:
        _set_aside(world, desired, step.target, step.detail["path"])
        return None

    def fetch(step: Step, world: World) -> Undo | None:
        file = files[step.detail["path"]]
        partial = f"{desired.folder}/{PARTIAL}/{file.path}"
        os.makedirs(os.path.dirname(world.path(partial)), exist_ok=True)
        if desired.source.startswith("/"):
            shutil.copyfile(world.path(f"{desired.source}/{file.path}"), world.path(partial))
        else:
            _download(world, desired, file, partial)
        digest = sha256_of(world.path(partial))
        if digest != file.sha256:
            kept = _set_aside(world, desired, partial, file.path)
            raise ApplyError(
                f"its sha256 is {digest} and not {file.sha256}; kept as {kept}, run again to fetch it anew, "
                "or correct the manifest"
            )
        os.makedirs(os.path.dirname(world.path(step.target)), exist_ok=True)
        os.replace(world.path(partial), world.path(step.target))
        # Verified bytes are recorded at once: a run that dies later must not read 50 GB again.
        _write_record(world, desired)
        return None

    def record(step: Step, world: World) -> Undo | None:
        _write_record(world, desired)
        shutil.rmtree(world.path(f"{desired.folder}/{PARTIAL}"), ignore_errors=True)
        return None

    def remove(step: Step, world: World) -> Undo | None:
        shutil.rmtree(world.path(desired.folder))
        return None

    return {"quarantine": quarantine, "fetch": fetch, "record": record, "remove-model": remove}


def _download(world: World, desired: ModelDesired, file: ModelFile, partial: str) -> None:
    """Attempts, each from where the last one ended, as long as every few of them bring bytes."""
    fruitless = 0
    while True:
        before = (_status(world.path(partial)) or (0, 0))[0]
        if before > file.size:
            world.remove(partial)
            before = 0
        if before == file.size:
            return
        result = world.run(
            ["curl", "--config", "-"], timeout_s=7 * 24 * 3600, stdin=_curl_config(world, desired, file, partial)
        )
        after = (_status(world.path(partial)) or (0, 0))[0]
        if result.ok and after == file.size:
            return
        if result.rc == _RANGE_IGNORED:  # the server sends whole files only
            world.remove(partial)
        fruitless = 0 if after > before else fruitless + 1
        if result.ok:
            raise ApplyError(
                f"the source has {after} bytes of it and the manifest says {file.size}; correct one of them"
            )
        if result.rc not in (*_TRANSIENT, _RANGE_IGNORED) or fruitless >= desired.attempts:
            said = result.err.strip().splitlines()[-1:] or ["no message"]
            raise ApplyError(f"{said[0]}; {after} of {file.size} bytes are kept, run again to go on from there")
        time.sleep(min(2.0**fruitless, 30.0) if fruitless else 0.2)


def _curl_config(world: World, desired: ModelDesired, file: ModelFile, partial: str) -> str:
    """Options on standard input: credentials must not be seen in the list of processes."""
    options: dict[str, Any] = {
        "url": desired.url(file),
        "output": world.path(partial),
        "continue-at": "-",
        "speed-limit": desired.stall_bytes_per_s,
        "speed-time": desired.stall_s,
        "connect-timeout": 20,
    }
    if desired.access_key:
        options["user"] = f"{desired.access_key}:{desired.secret_key}"
        options["aws-sigv4"] = f"aws:amz:{desired.region}:s3"
    lines = [f'{key} = "{_quoted(value)}"' for key, value in options.items()]
    if desired.token:
        lines.append(f'header = "Authorization: Bearer {_quoted(desired.token)}"')
    return "\n".join([*lines, "fail", "silent", "show-error", "location", ""])


def _quoted(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace('"', '\\"')


def _set_aside(world: World, desired: ModelDesired, path: str, name: str) -> str:
    """Move a wrong file out of reach; returns where it is now."""
    kept = f"{desired.folder}/{QUARANTINE}/{name}.{time.time_ns()}"
    os.makedirs(os.path.dirname(world.path(kept)), exist_ok=True)
    os.replace(world.path(path), world.path(kept))
    return kept


def _write_record(world: World, desired: ModelDesired) -> None:
    vouched = _record_of(world.read(f"{desired.folder}/{RECORD}"))
    entries = {}
    for file in desired.files:
        found = _status(world.path(f"{desired.folder}/{file.path}"))
        if found is None or found[0] != file.size:
            continue
        known = vouched.get(file.path)
        if known is None or (known["size"], known["mtime_ns"]) != found:
            known = {"size": found[0], "mtime_ns": found[1], "sha256": file.sha256}
        entries[file.path] = known
    world.write(f"{desired.folder}/{RECORD}", json.dumps(dict(sorted(entries.items())), indent=1))


def _record_of(text: str | None) -> Mapping[str, Any]:
    try:
        record = json.loads(text or "{}")
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _is_good(file: ModelFile, facts: ModelFacts) -> bool:
    there = facts.files.get(file.path)
    return there is not None and there.size == file.size and there.sha256 == file.sha256


def _complaint(file: ModelFile, there: Found) -> str:
    if there.size != file.size:
        return f"it has {there.size} bytes and the manifest says {file.size}"
    return f"its sha256 is {there.sha256} and the manifest says {file.sha256}"


def _status(path: str) -> tuple[int, int] | None:
    """(size, mtime in ns) of a regular file, or None."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_size, status.st_mtime_ns) if os.path.isfile(path) else None


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
