"""Writing so that a crash leaves either the old or the new, never half of one."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of entries, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Write beside `path`, sync, rename over it, sync the folder."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def replace_folder(new: Path, final: Path) -> None:
    """Put the finished folder `new` in the place of `final` (same file system); the old one goes last."""
    old = final.with_name(final.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    new.rename(final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def sha256_of(path: Path) -> str:
    """sha256 (hex) of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
