"""Files cut into pieces: every record is read exactly once, and what cannot be read is said."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafthouse.corpus.pieces import Raw, cut_file, cut_range, read_piece
from drafthouse.errors import CorpusError


def read(path: Path, piece_bytes: int = 1 << 20) -> list[Raw]:
    return [raw for piece in cut_file(0, path, piece_bytes) for raw in read_piece(piece)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.text("aü\n☂", max_size=9), max_size=12),
    piece_bytes=st.integers(1, 40),
    ends=st.booleans(),
)
def test_every_line_belongs_to_one_piece(tmp_path: Path, lines: list[str], piece_bytes: int, ends: bool) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + ("\n" if ends else ""), encoding="utf-8")
    assert [raw.value for raw in read(path, piece_bytes)] == lines


def test_lines_that_are_not_json_are_handed_on_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{x\n[' + b"[" * 99_999 + b"\n\xff\n2\n")
    found = read(path)
    assert [raw.value for raw in found] == [{"a": 1}, None, None, None, 2]
    assert [raw.problem is None for raw in found] == [True, False, False, False, True]
    assert found[1].at == 10
    assert found[1].text == "{x"


def test_compressed_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'1\n{"b": 2}\n'))
    assert [raw.value for raw in read(path)] == [1, {"b": 2}]
    path.write_bytes(gzip.compress(b"1\n" * 5000)[:-20])
    with pytest.raises(CorpusError, match="cannot be read"):
        read(path)


def test_an_array_larger_than_what_is_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    records = [{"text": "x" * 400_000, "n": n} for n in range(6)]
    path.write_text(json.dumps(records, indent=1), encoding="utf-8")
    assert [raw.value["n"] for raw in read(path)] == list(range(6))


@pytest.mark.parametrize(
    ("text", "values", "problem"),
    [
        ("[]", [], None),
        (" [1, 2 ,3] ", [1, 2, 3], None),
        ("[12345678901]", [12345678901], None),
        ("", [None], "does not end"),
        ("[1, 2", [1, 2, None], "does not end"),
        ("[1, {]", [1, None], "not JSON"),
        ('{"a": 1}', [None], "no JSON array"),
    ],
)
def test_arrays_whole_and_broken(tmp_path: Path, text: str, values: list[object], problem: str | None) -> None:
    path = tmp_path / "a.json"
    path.write_text(text, encoding="utf-8")
    found = read(path)
    assert [raw.value for raw in found] == values
    if problem is not None:
        assert problem in str(found[-1].problem)


def test_rows_of_a_table(tmp_path: Path) -> None:
    core, io = pytest.importorskip("arro3.core"), pytest.importorskip("arro3.io")
    rows = [{"messages": [{"role": "user", "content": f"ü{n}"}], "n": n} for n in range(700)]
    path = tmp_path / "a.parquet"
    struct = core.Array.from_arrow(core.Array([row["n"] for row in rows], core.DataType.int64()))
    nested = core.Array([json.dumps(row["messages"]) for row in rows], core.DataType.string())
    io.write_parquet(core.RecordBatch.from_arrays([struct, nested], names=["n", "messages"]), str(path))
    found = read(path)
    assert [raw.value["n"] for raw in found] == list(range(700))
    assert json.loads(found[699].value["messages"]) == rows[699]["messages"]
    assert [raw.at for raw in found[:3]] == [0, 1, 2]


def test_a_table_that_is_none(tmp_path: Path) -> None:
    pytest.importorskip("arro3.io")
    path = tmp_path / "a.parquet"
    path.write_bytes(b"no table")
    with pytest.raises(CorpusError, match="not a readable Parquet file"):
        read(path)


def test_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"not read; use one of \.jsonl"):
        cut_file(0, tmp_path / "a.csv")
    with pytest.raises(CorpusError, match="No such file"):
        cut_file(0, tmp_path / "a.jsonl")


def test_a_range_is_cut_without_gaps() -> None:
    assert [(piece.first, piece.last) for piece in cut_range(3, 10, 4)] == [(0, 4), (4, 8), (8, 10)]
