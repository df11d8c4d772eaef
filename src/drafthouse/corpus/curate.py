"""From a curation file to sealed conversations: read, filter, deduplicate, choose, shuffle, write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drafthouse.config import digest_of
from drafthouse.corpus import conversations as sets
from drafthouse.corpus.choosing import Choice, Staged, choose, located
from drafthouse.corpus.contamination import Contamination, contamination
from drafthouse.corpus.conversations import ConversationManifest, ConversationSet, ConversationShard
from drafthouse.corpus.curation import CurationSettings, GeneratedSource, LibraryTextSource
from drafthouse.corpus.disk import sweep, told
from drafthouse.corpus.origins import Origin, fetch
from drafthouse.corpus.pieces import Piece, cut_file, cut_range
from drafthouse.corpus.records import Split
from drafthouse.corpus.shards import name_is_taken
from drafthouse.corpus.staging import RULES, StagedPiece, StageJob, Summary, stage
from drafthouse.corpus.workers import Workers, default_processes
from drafthouse.errors import CorpusError
from drafthouse.progress import Progress, Silent
from drafthouse.store import Store
from drafthouse.store.exclusive import exclusive

SPLITS: tuple[Split, ...] = ("train", "heldout")
_EXAMPLES = 5  # of a reason, a source


@dataclass(frozen=True)
class _ShardJob:
    """Lines (path, offset, length) that make one shard."""

    url: str
    name: str
    lines: tuple[tuple[str, int, int], ...]


def set_name(name: str, split: Split) -> str:
    """The folder of a split of the set `name` in its store."""
    return name if split == "train" else f"{name}-heldout"


def curate(
    settings: CurationSettings,
    store_url: str,
    work: Path,
    *,
    base: Path = Path(),
    processes: int | None = None,
    progress: Progress | None = None,
    piece_bytes: int | None = None,
) -> dict[Split, ConversationManifest]:
    """Write the conversations `<name>` and `<name>-heldout` of a curation into a store.

    Args:
        settings: the curation.
        store_url: where the sets go (`Store.open`).
        work: folder for what is staged; a broken-off run goes on from there. It may be deleted afterwards.
        base: folder that relative paths of the curation start from.
        processes: how many work side by side; none: one a processor.
        progress: gets one bar for reading and one for writing.
        piece_bytes: bytes of a JSON Lines file that one job reads.

    Raises:
        ConfigError: another process stages the same curation in `work`.
        CorpusError: a source cannot be read, nothing is left, or the name belongs to another curation.
        StoreError: the store refuses, or `work` cannot be written.
    """
    progress = progress or Silent()
    store = Store.open(store_url)
    origins = [fetch(source, base, work / "downloads") for source in settings.sources]
    forbidden = contamination([base / path for path in settings.filters.evaluation], settings.filters.ngram)
    wanted = _identity(settings, origins, forbidden)
    if known := _known(store, settings.name, wanted):
        return known
    pieces = list(_pieces(settings, origins, piece_bytes))
    cut = [[piece.path, piece.first, piece.last] for piece in pieces]
    folder = work / digest_of([RULES, wanted, cut])[:16]
    plan = _Plan(settings, store_url, folder, pieces, origins, forbidden, wanted)
    with told(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder, "curates"), told(folder):
        sweep(folder)
        made = _made(plan, processes or default_processes(), progress)
    return _sealed(store, settings.name, made)


@dataclass(frozen=True)
class _Plan:
    """What a curation reads, and where it is staged."""

    settings: CurationSettings
    store_url: str
    folder: Path
    pieces: Sequence[Piece]
    origins: Sequence[Origin]
    forbidden: Contamination
    wanted: dict[str, Any]


def _made(plan: _Plan, processes: int, progress: Progress) -> dict[Split, ConversationManifest]:
    """Stage, choose and write; the manifests of what was written."""
    settings, folder, pieces = plan.settings, plan.folder, plan.pieces
    jobs = (StageJob(number, piece, str(folder), settings, plan.forbidden) for number, piece in enumerate(pieces))
    summaries: list[Summary] = []
    made: dict[Split, ConversationManifest] = {}
    with Workers(processes) as workers:
        with progress.task("reading sources", len(pieces)) as task:
            kept = 0
            for summary in workers.each(stage, jobs):
                summaries.append(summary)
                kept += summary.kept
                task.advance(note=f"{kept:,} kept")
        staged = Staged(folder, summaries)
        with progress.task("duplicates, quotas, order", None):
            choice = choose(staged, settings)
        if not choice.counts["train"]:
            raise CorpusError(
                f"no conversation is left ({_reasons(summaries, choice)})",
                where=settings.name,
                fix="check format and columns of its sources, and the filters",
            )
        for split in SPLITS:
            shards = _write(staged, choice, split, settings, plan.store_url, workers, progress)
            made[split] = _manifest(settings, split, shards, choice, summaries, plan.origins, plan.wanted)
    return made


def _sealed(store: Store, name: str, made: dict[Split, ConversationManifest]) -> dict[Split, ConversationManifest]:
    """Seal both sets, the training set last: where it is, the other one is too."""
    train, heldout = (store.child(set_name(name, split)) for split in SPLITS)
    wanted, mine = made["train"].settings, made["heldout"].to_json()
    if not heldout.create(sets.MANIFEST, mine):
        if known := _known(store, name, wanted):
            return known
        # Without its training set it was left by a run that was killed in between, perhaps over other files.
        heldout.put(sets.MANIFEST, mine)
    if not train.create(sets.MANIFEST, made["train"].to_json()):
        if known := _known(store, name, wanted):
            return known
        raise CorpusError("another process seals a set of this name", where=name, fix="run it again")
    if heldout.get(sets.MANIFEST) != mine:  # whoever had the same thought, and came second with the training set
        heldout.put(sets.MANIFEST, mine)
    return made


def _identity(settings: CurationSettings, origins: Sequence[Origin], forbidden: Contamination) -> dict[str, Any]:
    return {
        "curation": settings.model_dump(mode="json"),
        "origins": {
            source.name: origin.facts if origin.missing is None else {"missing": True}
            for source, origin in zip(settings.sources, origins, strict=True)
        },
        "evaluation": forbidden.fingerprint,
    }


def _known(store: Store, name: str, wanted: dict[str, Any]) -> dict[Split, ConversationManifest] | None:
    if store.child(name).head(sets.MANIFEST) is None:
        return None
    train = ConversationSet(store, name).manifest
    if train.settings != wanted:
        raise name_is_taken(name)
    try:
        heldout = ConversationSet(store, set_name(name, "heldout")).manifest
    except CorpusError:  # gone or damaged: made again from the same sources, it is the same
        return None
    whole = _whole(store.child(name), train) and _whole(store.child(set_name(name, "heldout")), heldout)
    return {"train": train, "heldout": heldout} if heldout.settings == wanted and whole else None


def _whole(store: Store, manifest: ConversationManifest) -> bool:
    """Whether the shards are there in their sizes; one of wrong bytes is found where it is read."""
    there = {info.key: info.size for info in store.list()}
    return all(there.get(shard.key) == shard.size for shard in manifest.shards)


def _pieces(settings: CurationSettings, origins: Sequence[Origin], piece_bytes: int | None) -> Iterator[Piece]:
    for number, (source, origin) in enumerate(zip(settings.sources, origins, strict=True)):
        if isinstance(source, (GeneratedSource, LibraryTextSource)):
            yield from cut_range(number, source.count)
        for path in origin.files:
            yield from cut_file(number, path) if piece_bytes is None else cut_file(number, path, piece_bytes)


def _write(
    staged: Staged,
    choice: Choice,
    split: Split,
    settings: CurationSettings,
    store_url: str,
    workers: Workers,
    progress: Progress,
) -> list[tuple[ConversationShard, Counter[str]]]:
    name, size, count = set_name(settings.name, split), settings.samples_per_shard, choice.counts[split]

    def jobs() -> Iterator[_ShardJob]:
        for start in range(0, count, size):
            records = np.fromfile(choice.orders[split], dtype=np.int64, count=size, offset=start * 8)
            places = located(staged, records)
            lines = tuple((str(StagedPiece(staged.folder, piece).lines), at, length) for piece, at, length in places)
            yield _ShardJob(store_url, name, lines)

    done = []
    with progress.task(f"writing conversations ({split})", -(-count // size)) as task:
        for shard in workers.each(_write_shard, jobs()):
            done.append(shard)
            task.advance()
    return done


def _write_shard(job: _ShardJob) -> tuple[ConversationShard, Counter[str]]:
    lines: list[bytes] = [b""] * len(job.lines)
    by_file: dict[str, list[int]] = {}
    for place, (path, _, _) in enumerate(job.lines):
        by_file.setdefault(path, []).append(place)
    for path, places in by_file.items():
        with Path(path).open("rb") as file:
            for place in places:
                _, at, length = job.lines[place]
                file.seek(at)
                lines[place] = file.read(length)
    kinds: Counter[str] = Counter()
    for line in lines:
        kinds[_kind_of(line)] += 1
    return sets.put_shard(Store.open(job.url).child(job.name), lines), kinds


def _kind_of(line: bytes) -> str:
    # Staged lines begin with id and kind, both plain words.
    return line[:400].split(b'"kind": "', 1)[1].split(b'"', 1)[0].decode()


def _manifest(
    settings: CurationSettings,
    split: Split,
    shards: Sequence[tuple[ConversationShard, Counter[str]]],
    choice: Choice,
    summaries: Sequence[Summary],
    origins: Sequence[Origin],
    wanted: dict[str, Any],
) -> ConversationManifest:
    drops: dict[str, Counter[str]] = {name: Counter(counts) for name, counts in choice.drops.items()}
    read: Counter[str] = Counter()
    examples: dict[str, dict[str, list[Any]]] = {}
    for summary in summaries:
        name = settings.sources[summary.source].name
        read[name] += summary.read
        drops[name].update(summary.drops)
        for reason, shown in summary.examples.items():
            kept = examples.setdefault(name, {}).setdefault(reason, [])
            kept.extend(shown[: _EXAMPLES - len(kept)])
    sources = {
        source.name: {
            "kind": source.kind,
            "licence": source.licence,
            "read": read[source.name],
            "taken": choice.taken["train"][source.name],
            "heldout": choice.taken["heldout"][source.name],
            "origin": origin.facts,
            **({"missing": origin.missing} if origin.missing is not None else {}),
        }
        for source, origin in zip(settings.sources, origins, strict=True)
    }
    entries = tuple(shard for shard, _ in shards)
    kinds: Counter[str] = Counter()
    for _, counts in shards:
        kinds.update(counts)
    return ConversationManifest(
        schema_version=sets.SCHEMA,
        digest=sets.set_digest([shard.sha256 for shard in entries]),
        shards=entries,
        samples=sum(shard.samples for shard in entries),
        split=split,
        kinds=dict(sorted(kinds.items())),
        sources=sources,
        drops={name: dict(sorted(counts.items())) for name, counts in drops.items() if counts},
        short=choice.short,
        settings=wanted,
        examples=examples,
    )


def _reasons(summaries: Sequence[Summary], choice: Choice) -> str:
    total: Counter[str] = Counter()
    for counts in (*(summary.drops for summary in summaries), *choice.drops.values()):
        total.update(counts)
    return ", ".join(f"{count} {reason}" for reason, count in total.most_common()) or "the sources are empty"
