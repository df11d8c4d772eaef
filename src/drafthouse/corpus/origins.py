"""Bringing a source's files onto this machine, and saying what exactly was read."""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from drafthouse.corpus import sources
from drafthouse.corpus.curation import (
    CuratedSource,
    FilesSource,
    HubSource,
    LibraryTextSource,
    StoreSource,
)
from drafthouse.corpus.disk import told
from drafthouse.errors import CorpusError, StoreError
from drafthouse.store import Store

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # no fault of a hub


@dataclass(frozen=True)
class Origin:
    """The files of a source, in order, and what the manifest says about them; `missing` has the reason."""

    files: tuple[Path, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    missing: str | None = None


def fetch(source: CuratedSource, base: Path, cache: Path) -> Origin:
    """The files of a source.

    Args:
        source: where they are.
        base: folder that relative paths start from.
        cache: where downloads are kept; hub files lie in the hub's own cache.

    Raises:
        CorpusError: they are not there and the source is not optional.
        StoreError: objects that are there cannot be copied, or the cache cannot be written.
    """
    if isinstance(source, LibraryTextSource):
        return Origin(facts={"fingerprint": sources.library("train").fingerprint})
    if not isinstance(source, (FilesSource, HubSource, StoreSource)):
        return Origin()
    try:
        if isinstance(source, FilesSource):
            return _local(source, base)
        return _from_hub(source) if isinstance(source, HubSource) else _from_store(source, cache)
    except CorpusError as error:
        if source.optional:
            return Origin(missing=str(error))
        raise


def _local(source: FilesSource, base: Path) -> Origin:
    files: list[Path] = []
    for pattern in source.paths:
        full = (base / pattern).absolute()
        found = sorted(path for path in Path(full.anchor).glob(str(full.relative_to(full.anchor))) if path.is_file())
        if not found:
            raise CorpusError(
                "there is no such file", where=f"{source.name}: {pattern}", fix="check the source's paths"
            )
        files += found
    # Below the folder that they share, for two of one name may lie in two; and not from the root on, for the same files
    # may lie elsewhere on another machine.
    shared = Path(os.path.commonpath([path.parent for path in files]))
    return Origin(tuple(files), {"files": {path.relative_to(shared).as_posix(): file_sha256(path) for path in files}})


def _from_hub(source: HubSource) -> Origin:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"{source.name}: {source.repo}@{source.revision}"
    try:
        commit = str(HfApi().dataset_info(source.repo, revision=source.revision).sha)
    except (RepositoryNotFoundError, RevisionNotFoundError, ValueError) as error:
        raise CorpusError(
            "the hub has no such data set or revision", where=where, fix="check repo, revision and your access"
        ) from error
    except Exception as error:  # offline, proxies, DNS: the hub's client lets its HTTP library's errors through
        commit = source.revision
        offline: Exception | None = error
    else:
        offline = None
    try:
        folder = snapshot_download(
            source.repo,
            repo_type="dataset",
            revision=commit,
            allow_patterns=list(source.files),
            local_files_only=offline is not None,
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno in _DISK:
            with told(Path(error.filename or HF_HUB_CACHE)):
                raise
        cause = offline or error
        raise CorpusError(
            f"the hub cannot be reached and its cache lacks the files ({type(cause).__name__})",
            where=where,
            fix="run where a hub is reachable, or copy its cache (HF_HOME) here",
        ) from error
    files = sorted(
        path
        for path in Path(folder).rglob("*")
        if path.is_file() and any(fnmatch(str(path.relative_to(folder)), pattern) for pattern in source.files)
    )
    if not files:
        raise CorpusError("no file of the data set fits", where=f"{where}: {', '.join(source.files)}")
    return Origin(tuple(files), {"repo": source.repo, "commit": Path(folder).name, "files": len(files)})


def _from_store(source: StoreSource, cache: Path) -> Origin:
    try:
        store = Store.open(source.url)
        infos = store.list()
    except StoreError as error:
        raise CorpusError(str(error), where=source.name, fix="check the source's url") from error
    if not infos:
        raise CorpusError("nothing lies below this prefix", where=f"{source.name}: {store.url}")
    folder = cache / hashlib.sha256(store.url.encode()).hexdigest()[:16]
    files, stamps = [], []
    for info in infos:
        # The time is part of the name: an object that was written again is fetched again.
        stamp = hashlib.sha256(f"{info.key}\0{info.size}\0{info.last_modified}".encode()).hexdigest()[:12]
        stamps.append(stamp)
        path = folder / f"{stamp}-{info.key.rpartition('/')[2]}"
        if not path.exists():
            store.download(info.key, path)
        files.append(path)
    fingerprint = hashlib.sha256(" ".join(stamps).encode()).hexdigest()
    return Origin(tuple(files), {"url": store.url, "files": len(files), "fingerprint": fingerprint})


def file_sha256(path: Path) -> str:
    """sha256 (hex) of a file.

    Raises:
        CorpusError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CorpusError(
            f"cannot be read ({error.strerror})", where=str(path), fix="check the path of the source"
        ) from None
