"""Which of the staged conversations make the corpus, and in which order.

Everything here works on slices of the keys (hashes of the contents), so that memory holds a slice and one byte a
record, however many there are. Choice and order follow from keys alone: they do not depend on the order of files,
on the number of processes or on where a run was interrupted.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from drafthouse.corpus.curation import CurationSettings
from drafthouse.corpus.disk import Parts
from drafthouse.corpus.records import Split
from drafthouse.corpus.similar import PERMUTATIONS, Signatures, later_duplicates
from drafthouse.corpus.staging import INDEX, StagedPiece, Summary

Numbers = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

_SLICE = 1 << 16  # records sorted in one go
_BINS = 1 << 16


@dataclass
class Choice:
    """What was chosen: a file of record numbers (int64) a split, in order; and what was not, by source.

    `taken` says by split and source how many were chosen, `short` by kind how many samples its quota lacks.
    """

    orders: dict[Split, Path]
    counts: dict[Split, int]
    taken: dict[Split, dict[str, int]] = field(default_factory=dict)
    drops: dict[str, Counter[str]] = field(default_factory=dict)
    short: dict[str, int] = field(default_factory=dict)


class Staged:
    """All pieces of a staging folder, numbered through: record n is the n-th of all that were kept."""

    def __init__(self, folder: Path, summaries: Sequence[Summary]) -> None:
        self.folder, self.summaries = folder, list(summaries)
        self.first = [0, *itertools.accumulate(summary.kept for summary in self.summaries)]
        self.total = self.first[-1]

    def indexes(self) -> Iterator[tuple[int, Summary, npt.NDArray[np.void]]]:
        """The number of its first record, the summary and the index of every piece."""
        for number, summary in enumerate(self.summaries):
            yield self.first[number], summary, np.fromfile(StagedPiece(self.folder, number).index, dtype=INDEX)

    def band(self, number: int) -> Iterator[tuple[int, Keys]]:
        """The values of one band, piece after piece, each with the number of its first record."""
        for piece, summary in enumerate(self.summaries):
            path = StagedPiece(self.folder, piece).bands
            at = number * summary.kept * 8
            yield self.first[piece], np.fromfile(path, dtype=np.uint64, count=summary.kept, offset=at)

    def signature(self, records: Numbers) -> Signatures:
        """Signatures of some records, whose numbers ascend."""
        out = np.empty((len(records), PERMUTATIONS), dtype=np.uint32)
        row = PERMUTATIONS * 4
        place = 0
        while place < len(records):
            piece = self.piece_of(int(records[place]))
            end = int(np.searchsorted(records, self.first[piece + 1]))
            with StagedPiece(self.folder, piece).signatures.open("rb") as file:
                for number in range(place, end):
                    file.seek((int(records[number]) - self.first[piece]) * row)
                    out[number] = np.frombuffer(file.read(row), dtype=np.uint32)
            place = end
        return out

    def piece_of(self, record: int) -> int:
        return bisect_right(self.first, record) - 1


def choose(staged: Staged, settings: CurationSettings) -> Choice:
    """Drop duplicates, split, fill the quotas, shuffle; writes `<split>.order` into the staging folder."""
    names = [source.name for source in settings.sources]
    drops: dict[str, Counter[str]] = {name: Counter() for name in names}
    alive = np.ones(staged.total, dtype=bool)
    _drop(staged, alive, _equal_keys(staged), "duplicate", names, drops)
    threshold = settings.filters.near_duplicates
    if threshold is not None and staged.total:
        similar = later_duplicates(alive, staged.band, staged.signature, threshold)
        _drop(staged, alive, similar, "near_duplicate", names, drops)

    available: dict[Split, Counter[str]] = {"train": Counter(), "heldout": Counter()}
    for first, summary, index in staged.indexes():
        here = alive[first : first + len(index)]
        held = index["heldout"].astype(bool)
        available["heldout"][names[summary.source]] += int((here & held).sum())
        available["train"][names[summary.source]] += int((here & ~held).sum())
    quotas, short = _quotas(settings, available)
    choice = Choice({}, {}, drops=drops, short=short)
    for split in ("train", "heldout"):
        taken = np.zeros(staged.total, dtype=bool)
        for place, name in enumerate(names):
            wanted = quotas[split][name]
            _lowest(staged, alive, place, split, wanted, taken)
            if over := available[split][name] - wanted:
                drops[name][f"over_quota_{split}"] += over
        choice.taken[split] = _by_source(staged, taken, names)
        choice.orders[split] = staged.folder / f"{split}.order"
        choice.counts[split] = int(taken.sum())
        _write_order(staged, taken, choice.orders[split])
    return choice


def shares(wanted: int, sources: Sequence[tuple[int, float]]) -> list[int]:
    """Split `wanted` over sources of (available, weight): by weight, and what one lacks the others give.

    The sum is the smaller one of `wanted` and all that is available; nobody gives more than it has.
    """
    given = [0] * len(sources)
    open_ = [place for place, (available, _) in enumerate(sources) if available]
    rest = min(wanted, sum(available for available, _ in sources))
    while rest and open_:
        total = sum(sources[place][1] for place in open_)
        exact = {place: rest * sources[place][1] / total for place in open_}
        full = [place for place in open_ if exact[place] >= sources[place][0] - given[place]]
        if full:
            for place in full:
                rest -= sources[place][0] - given[place]
                given[place] = sources[place][0]
            open_ = [place for place in open_ if place not in full]
            continue
        for place in open_:
            given[place] += int(exact[place])
        left = rest - sum(int(exact[place]) for place in open_)
        for place in sorted(open_, key=lambda place: (int(exact[place]) - exact[place], place))[:left]:
            given[place] += 1
        rest = 0
    return given


def _quotas(
    settings: CurationSettings, available: dict[Split, Counter[str]]
) -> tuple[dict[Split, dict[str, int]], dict[str, int]]:
    quotas: dict[Split, dict[str, int]] = {"train": {}, "heldout": {}}
    short: dict[str, int] = {}
    for kind, wish in settings.kinds.items():
        members = [source for source in settings.sources if source.kind == kind]
        have = [min(available["train"][one.name], one.cap or available["train"][one.name]) for one in members]
        wanted = sum(have) if wish.quota is None else wish.quota
        parts = shares(wanted, [(count, one.weight) for count, one in zip(have, members, strict=True)])
        quotas["train"] |= {one.name: part for one, part in zip(members, parts, strict=True)}
        if missing := wanted - sum(parts):
            short[kind] = missing
        held = [(available["heldout"][one.name], one.weight) for one in members]
        quotas["heldout"] |= {one.name: part for one, part in zip(members, shares(settings.heldout, held), strict=True)}
    return quotas, short


def _sliced(
    staged: Staged, chosen: Callable[[int, Summary, npt.NDArray[np.void]], npt.NDArray[np.bool_]], mix: bool
) -> Iterator[tuple[Numbers, Keys]]:
    """Records and keys of slices of the keys' range, in ascending order of key (of mixed key)."""
    slices = max(1, -(-staged.total // _SLICE))
    borders = [(1 << 64) * number // slices for number in range(slices + 1)]
    for low, high in itertools.pairwise(borders):
        records: list[Numbers] = []
        keys: list[Keys] = []
        for first, summary, index in staged.indexes():
            here = mixed(index["key"]) if mix else index["key"]
            inside = chosen(first, summary, index) & (here >= np.uint64(low)) & (here <= np.uint64(high - 1))
            records.append(np.flatnonzero(inside) + first)
            keys.append(here[inside])
        joined = np.concatenate(records) if records else np.empty(0, dtype=np.int64)
        together = np.concatenate(keys) if keys else np.empty(0, dtype=np.uint64)
        order = np.argsort(together, kind="stable")
        yield joined[order], together[order]


def mixed(keys: Keys) -> Keys:
    """Another order of the same keys (splitmix64's finaliser, a bijection): choosing must not shape the order."""
    value = keys + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _equal_keys(staged: Staged) -> npt.NDArray[np.bool_]:
    """Records whose contents an earlier record has."""
    twice = np.zeros(staged.total, dtype=bool)
    for records, keys in _sliced(staged, lambda _first, _summary, index: np.ones(len(index), dtype=bool), mix=False):
        if len(keys):
            twice[records[1:][keys[1:] == keys[:-1]]] = True
    return twice


def _drop(
    staged: Staged,
    alive: npt.NDArray[np.bool_],
    which: npt.NDArray[np.bool_],
    reason: str,
    names: Sequence[str],
    drops: dict[str, Counter[str]],
) -> None:
    for number, summary in enumerate(staged.summaries):
        piece = slice(staged.first[number], staged.first[number + 1])
        if count := int((which[piece] & alive[piece]).sum()):
            drops[names[summary.source]][reason] += count
    alive &= ~which


def _lowest(
    staged: Staged,
    alive: npt.NDArray[np.bool_],
    source: int,
    split: Split,
    wanted: int,
    taken: npt.NDArray[np.bool_],
) -> None:
    """Take the `wanted` records of lowest key of one source and split: two passes, a histogram and a border bin."""

    def keys() -> Iterator[tuple[int, Keys, npt.NDArray[np.bool_]]]:
        for first, summary, index in staged.indexes():
            if summary.source == source:
                mine = alive[first : first + len(index)] & (index["heldout"].astype(bool) == (split == "heldout"))
                yield first, index["key"], mine

    if not wanted:
        return
    counts = np.zeros(_BINS, dtype=np.int64)
    for _, values, mine in keys():
        counts += np.bincount((values[mine] >> np.uint64(48)).astype(np.int64), minlength=_BINS)
    border = int(np.searchsorted(np.cumsum(counts), wanted))
    rest = wanted - int(counts[:border].sum())
    records: list[Numbers] = []
    edge: list[Keys] = []
    for first, values, mine in keys():
        bins = (values >> np.uint64(48)).astype(np.int64)
        taken[first : first + len(values)] |= mine & (bins < border)
        at_border = np.flatnonzero(mine & (bins == border))
        records.append(at_border + first)
        edge.append(values[at_border])
    order = np.argsort(np.concatenate(edge), kind="stable")[:rest]
    taken[np.concatenate(records)[order]] = True


def _by_source(staged: Staged, taken: npt.NDArray[np.bool_], names: Sequence[str]) -> dict[str, int]:
    """How many records of every source were taken: counted, so that the card's sums prove something."""
    counts = dict.fromkeys(names, 0)
    for number, summary in enumerate(staged.summaries):
        counts[names[summary.source]] += int(taken[staged.first[number] : staged.first[number + 1]].sum())
    return counts


def _write_order(staged: Staged, taken: npt.NDArray[np.bool_], path: Path) -> None:
    with Parts() as parts:
        file = parts.begin(path)
        for records, _ in _sliced(staged, lambda first, _summary, index: taken[first : first + len(index)], mix=True):
            file.write(records.astype(np.int64).tobytes())


def located(staged: Staged, records: Numbers) -> list[tuple[int, int, int]]:
    """Piece, byte offset and length of records, in their order; reads only their entries of the indexes."""
    out: list[tuple[int, int, int]] = [(0, 0, 0)] * len(records)
    by_piece: dict[int, list[int]] = {}
    for place, record in enumerate(records.tolist()):
        by_piece.setdefault(staged.piece_of(record), []).append(place)
    for piece, places in by_piece.items():
        index = np.fromfile(StagedPiece(staged.folder, piece).index, dtype=INDEX)
        for place in places:
            entry = index[int(records[place]) - staged.first[piece]]
            out[place] = (piece, int(entry["offset"]), int(entry["length"]))
    return out
