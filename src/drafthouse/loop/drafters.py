"""Exported drafters in a store, where a machine finds them that has not trained them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafthouse.drafter.durable import replace_folder, sha256_of
from drafthouse.drafter.export import CONFIG, WEIGHTS
from drafthouse.drafter.trainer import DRAFTER, METRICS
from drafthouse.loop.committed import Committed, CommittedFolders
from drafthouse.loop.job import FenceWatch
from drafthouse.store import Store


def drafters_in(store: Store, recipe: str, watch: FenceWatch | None = None) -> CommittedFolders:
    """The drafters that trainings of `recipe` have exported into a store."""
    return CommittedFolders(store.child(f"drafters/{recipe}/drafter"), watch, (CONFIG, WEIGHTS, METRICS))


def fetch_drafter(
    drafters: CommittedFolders, one: Committed, folder: Path, spec: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Copy an exported drafter and its curve into a training's folder, unless the same is there; returns what its
    manifest says about it.

    Raises:
        DamagedError: it is not whole in the store.
        DrafterError: it is of other settings than `spec`.
    """
    about = drafters.about(one, spec)
    files = drafters.manifest(one.step, one.epoch)["files"]
    there = {CONFIG: folder / DRAFTER / CONFIG, WEIGHTS: folder / DRAFTER / WEIGHTS, METRICS: folder / METRICS}
    if all(path.exists() and sha256_of(path) == files[name]["sha256"] for name, path in there.items()):
        return about
    partial = folder / f"{DRAFTER}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        drafters.fetch(one, partial)
        (partial / METRICS).replace(folder / METRICS)
        replace_folder(partial, folder / DRAFTER)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return about
