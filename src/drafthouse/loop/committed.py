"""Folders of files in a store that are there at once and whole, each of one step of a run and one epoch of its job.

    <step>-<epoch>/<name>-<sha256>      data; a key of its own for each content, so that writers never overwrite
    <step>-<epoch>/manifest.json        created last: what it is of, and key, size and sha256 of each file

A manifest is create-only: of writers that race for one folder the first one's counts, and the others remove what it
does not name. What a lower epoch committed after it was fenced off does not count, by the store's clock; nor does
what carries the same time as the fence, because S3 tells whole seconds.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from drafthouse.config import differences
from drafthouse.drafter.durable import sha256_of
from drafthouse.errors import DrafterError, StoreError
from drafthouse.loop.job import FenceWatch
from drafthouse.store import ObjectInfo, ObjectMissingError, Store
from drafthouse.store.body import from_body, to_body
from drafthouse.store.keys import check_key

SCHEMA = 1
MANIFEST = "manifest.json"
# S3 tells whole seconds. What is this much older than the newest is older than any fence that is yet to come.
SETTLED = timedelta(seconds=2)
# Data without a manifest that is this much older than the newest belongs to a writer that died.
ABANDONED = timedelta(hours=1)

_KEY = re.compile(r"(?P<step>\d{8,})-(?P<epoch>\d+)/(?P<name>[^/]+)")


class DamagedError(StoreError):
    """A committed folder is not what its manifest says."""


@dataclass(frozen=True, order=True)
class Committed:
    """A folder with a manifest: `step` of the run, `epoch` of the job (0: outside of one), and when it was
    committed, by the store's clock."""

    step: int
    epoch: int
    at: datetime

    @property
    def key(self) -> str:
        return _place(self.step, self.epoch)


class CommittedFolders:
    """The folders of one kind (checkpoints, finished drafters) of a run.

    Args:
        store: holds them and nothing else.
        watch: the fence of the job that writes here; None outside of a job: then everything counts.
        names: files that every folder has; one without them is damaged.
    """

    def __init__(self, store: Store, watch: FenceWatch | None = None, names: Collection[str] = ()) -> None:
        self.store, self._watch, self._names = store, watch, frozenset(names)
        self.epoch = watch.epoch if watch else 0

    def publish(self, step: int, files: Mapping[str, Path], about: Mapping[str, Any]) -> ObjectInfo | None:
        """Upload `files` (name in the folder -> local file, which does not change meanwhile) and commit them.

        Args:
            about: JSON-able, kept in the manifest.

        Returns:
            The manifest as the store has it; None when another writer of this step and epoch was first and has
            other bytes.

        Raises:
            FencedError: the job was moved elsewhere: nothing is committed.
            StoreError: the store failed; publishing again is safe.
        """
        self._check()
        place, entries = _place(step, self.epoch), {}
        for name, path in files.items():
            sha256 = sha256_of(path)
            info = self.store.upload(f"{place}/{name}-{sha256}", path)
            entries[name] = {"key": info.key, "size": info.size, "sha256": sha256}
        self._check()  # an upload may take minutes
        manifest = f"{place}/{MANIFEST}"
        body = {"schema": SCHEMA, "step": step, "epoch": self.epoch, "about": dict(about), "files": entries}
        if self.store.create(manifest, to_body(body)):
            return self.store.head(manifest)
        try:
            theirs = {file["key"] for file in self.manifest(step, self.epoch)["files"].values()}
        except DamagedError:
            self.store.delete(manifest)  # nobody can use it: the next attempt commits anew
            raise
        for file in entries.values():
            if file["key"] not in theirs:
                self.store.delete(str(file["key"]))
        return None

    def counting(self) -> list[Committed]:
        """All that count for this epoch, highest step first, of equal steps the highest epoch."""
        found = [one for info in self.store.list() if (one := _committed(info))]
        if self._watch is not None:
            over = {epoch: self._watch.fence.since(epoch) for epoch in {one.epoch for one in found}}
            found = [one for one in found if self._counts(one, over[one.epoch])]
        return sorted(found, reverse=True)

    def manifest(self, step: int, epoch: int) -> dict[str, Any]:
        """The manifest of a committed folder.

        Raises:
            DamagedError: it is not there any more, or not a manifest of ours.
        """
        key = f"{_place(step, epoch)}/{MANIFEST}"
        where = f"{self.store.url}/{key}"
        try:
            data = self.store.get(key)
        except ObjectMissingError:
            raise DamagedError("its manifest is missing", where=where) from None
        try:
            body = from_body(data, where)
            right = body["schema"] == SCHEMA and isinstance(body["about"], dict) and self._names <= body["files"].keys()
            for name, file in body["files"].items():
                right = right and "/" not in check_key(name) and {"key", "size", "sha256"} <= file.keys()
        except (StoreError, KeyError, AttributeError, TypeError):
            right = False
        if not right:
            raise DamagedError("its manifest is damaged", where=where)
        return body

    def about(self, one: Committed, spec: Mapping[str, Any] | None) -> dict[str, Any]:
        """What was kept about `one` when it was published, with `spec` in it (None: whatever it is of).

        Raises:
            DamagedError: its manifest is damaged or gone.
            DrafterError: it is of other settings.
        """
        about: dict[str, Any] = self.manifest(one.step, one.epoch)["about"]
        changed = differences(about.get("spec"), dict(spec)) if spec is not None else []
        if changed:
            raise DrafterError(
                f"the store holds a run with other settings ({'; '.join(changed)})",
                where=f"{self.store.url}/{one.key}",
                fix="restore those settings, use another name for the recipe, or delete what is there",
            )
        return about

    def fetch(self, one: Committed, folder: Path) -> dict[str, Any]:
        """Copy the files of `one` into `folder` (made when needed), each compared with the manifest, which is returned.

        Raises:
            DamagedError: a file is missing or has other bytes.
            StoreError: the store cannot be reached, or the local disk is full.
        """
        manifest = self.manifest(one.step, one.epoch)
        for name, file in manifest["files"].items():
            path, where = folder / name, f"{self.store.url}/{file['key']}"
            try:
                self.store.download(file["key"], path)
            except ObjectMissingError:
                raise DamagedError(f"{name} is missing", where=where) from None
            if path.stat().st_size != file["size"]:
                raise DamagedError(
                    f"{name} has {path.stat().st_size} bytes, not {file['size']}: it was cut short", where=where
                )
            if sha256_of(path) != file["sha256"]:
                raise DamagedError(f"{name} does not have the sha256 of its manifest", where=where)
        return manifest

    def prune(self, keep: int, passed_over: Collection[Committed] = ()) -> None:
        """Remove all but the newest `keep` that count, and what writers of this or lower epochs left unfinished.

        The fence is asked first, and at least one that is `SETTLED` stays: so the next epoch, whose fence may be
        raised while this removes, finds one that counts.

        Args:
            passed_over: those that proved damaged: they are not counted among the `keep`.
        """
        self._check()
        counting = [one for one in self.counting() if one not in passed_over]
        if not counting:
            return
        newest = max(one.at for one in counting)
        settled = next((i for i, one in enumerate(counting) if newest - one.at >= SETTLED), len(counting))
        kept = {one.key for one in counting[: max(keep, settled + 1)]}
        everything = self.store.list()
        committed = {one.key for info in everything if (one := _committed(info))}
        # Manifests first: a removal that is interrupted leaves rests and no damaged folder.
        for info in sorted(everything, key=lambda info: not info.key.endswith(f"/{MANIFEST}")):
            match = _KEY.fullmatch(info.key)
            if match is None or int(match["epoch"]) > self.epoch:
                continue
            place = info.key.rpartition("/")[0]
            old = place not in kept if place in committed else newest - info.last_modified > ABANDONED
            if old:
                self.store.delete(info.key)

    def _check(self) -> None:
        if self._watch is not None:
            self._watch.now()

    def _counts(self, one: Committed, over: datetime | None) -> bool:
        return one.epoch == self.epoch or (one.epoch < self.epoch and (over is None or one.at < over))


def _place(step: int, epoch: int) -> str:
    return f"{step:08d}-{epoch}"


def _committed(info: ObjectInfo) -> Committed | None:
    match = _KEY.fullmatch(info.key)
    if match is None or match["name"] != MANIFEST:
        return None
    return Committed(int(match["step"]), int(match["epoch"]), info.last_modified)
