"""Files cut into pieces: every record is read exactly once, and what cannot be read is said."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafthouse.corpus import pieces
from drafthouse.corpus.pieces import Raw, cut_file, cut_range, read_piece
from drafthouse.errors import CorpusError


def read(path: Path, piece_bytes: int = 1 << 20) -> list[Raw]:
    return [raw for piece in cut_file(0, path, piece_bytes) for raw in read_piece(piece)]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
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


def test_compressed_lines_that_are_damaged(tmp_path: Path) -> None:
    whole = gzip.compress("".join(f"{n * n}\n" for n in range(5000)).encode())
    path, sentences = tmp_path / "a.jsonl.gz", set()
    damaged = [whole[:-20], b"hello", b"", whole[:-8] + bytes(8), whole + b"more"]
    damaged += [whole[:at] + b"\xff" * 40 + whole[at + 40 :] for at in range(10, len(whole) - 60, 611)]
    for data in damaged:
        path.write_bytes(data)
        if not data:
            assert read(path) == []
            continue
        with pytest.raises(CorpusError, match=r"a\.jsonl\.gz: cannot be read \(.*fetch the file again") as caught:
            read(path)
        assert "\n" not in str(caught.value)
        sentences.add(str(caught.value).partition("while decompressing")[0])
    assert len(sentences) > 4, "they are damaged in different ways"


def test_an_array_larger_than_what_is_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    records = [{"text": "x" * 400_000, "n": n} for n in range(6)]
    path.write_text(json.dumps(records, indent=1), encoding="utf-8")
    assert [raw.value["n"] for raw in read(path)] == list(range(6))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("[]", []),
        (" [1, 2 ,3] ", [1, 2, 3]),
        ("[12345678901]", [12345678901]),
        ('["]", "[", "\\"", [{}], {"a": "ü"}]\n', ["]", "[", '"', [{}], {"a": "ü"}]),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, values: list[object], encoding: str, chunk: int
) -> None:
    monkeypatch.setattr(pieces, "_READ", chunk)
    path = tmp_path / "a.json"
    path.write_text(text, encoding=encoding)
    found = read(path)
    assert [raw.value for raw in found] == values
    assert [raw.at for raw in found] == list(range(len(values)))
    assert {raw.problem for raw in found} <= {None}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "character 0: the file is empty and is no JSON array"),
        ('{"a": 1}\n{"a": 2}\n', r"character 0: the file begins with '\{' and is no JSON array; name it .jsonl"),
        ("[1, 2", "character 5: the array ends in the midst, behind 2 elements"),
        ("[1, {]", r"character 5: element 1 is not JSON \(Expecting property name"),
        ('[{"a": 1}, {"a": "x}, {"a": 2}, {"a": 3}]', r"character 24: element 1 is not JSON \(Expecting ',' delimiter"),
        ('[{"a": 1}, {"a": ', r"character 17: element 1 is not JSON \(Expecting value\)"),
        ("[1, nul, 2]", r"character 4: element 1 is not JSON"),
        (f"[1, {'7' * 5000}]", r"character 4: element 1 is not JSON \(Exceeds the limit"),
        ("[1] [2]", "character 4: something follows the array of 1 elements"),
        (f"[1, {'[' * 5000}", "character 4: element 1 does not end"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_of_a_broken_array_nobody_knows_how_much_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, sentence: str, chunk: int
) -> None:
    if chunk == 1 and len(text) > 1000:
        chunk = 1000  # deep ones are looked through anew for every chunk
    monkeypatch.setattr(pieces, "_READ", chunk)
    path = tmp_path / "a.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CorpusError, match=rf"a\.json, {sentence}") as caught:
        read(path)
    assert caught.value.fix


def test_an_endless_element_is_broken_before_memory_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_READ", 100)
    monkeypatch.setattr(pieces, "_LONGEST_RECORD", 1000)
    path = tmp_path / "a.json"
    path.write_text('[1, "' + "x" * 5000, encoding="utf-8")
    with pytest.raises(CorpusError, match=r"character 4: element 1 is not JSON or longer than 1000 characters"):
        read(path)


@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_elements_of_other_bytes_or_of_too_many_levels_cost_only_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(pieces, "_READ", chunk)
    deep = b'{"a": ["]", ' + b"[" * 2000 + b"]" * 2000 + b"]}"
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"a": "\xc3\xbc"}, {"a": "caf\xe9"}, ' + deep + b', {"a": "\\ud800"}, 5]')
    found = read(path)
    assert [raw.value for raw in found] == [{"a": "ü"}, None, None, {"a": "\ud800"}, 5]
    assert [raw.reason for raw in found if raw.problem] == ["not_utf8", "too_deep"]
    assert found[1].problem == "not UTF-8 (character 23 is the byte 0xe9)"
    assert found[1].text == '{"a": "caf\\xe9"}'
    assert found[2].text.startswith('{"a": ["]", [[')


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.jsonl.gz"])
def test_wide_characters_are_an_error_that_names_the_file(tmp_path: Path, name: str, encoding: str) -> None:
    text = json.dumps([{"a": 1}]) + "\n" + ("" if name == "a.json" else "[]\n")
    data = text.encode(encoding)
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    with pytest.raises(CorpusError, match=rf"{name}: the file is UTF-.* and not UTF-8 \(byte 0\); write it again"):
        read(path)


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


def test_a_damaged_table(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    core, io = pytest.importorskip("arro3.core"), pytest.importorskip("arro3.io")
    path = tmp_path / "a.parquet"
    texts = [f"text {n * n}" for n in range(3000)]
    io.write_parquet(core.Table.from_arrays([core.Array(texts, core.DataType.utf8())], names=["a"]), str(path))
    whole = path.read_bytes()
    refused = 0
    for at in range(4, len(whole) - 40, len(whole) // 60):
        path.write_bytes(whole[:at] + b"\xff" * 32 + whole[at + 32 :])
        try:
            read(path)
        except CorpusError as error:
            refused += 1
            assert "not a readable Parquet file" in error.what  # noqa: PT017
            assert len(error.what) < 250  # noqa: PT017
            assert "\n" not in str(error)  # noqa: PT017
    assert refused > 40
    assert capfd.readouterr().err == "", "a panic is told once, as a sentence"


def test_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"not read; use one of \.jsonl"):
        cut_file(0, tmp_path / "a.csv")
    with pytest.raises(CorpusError, match="No such file"):
        cut_file(0, tmp_path / "a.jsonl")


def test_a_range_is_cut_without_gaps() -> None:
    assert [(piece.first, piece.last) for piece in cut_range(3, 10, 4)] == [(0, 4), (4, 8), (8, 10)]
