"""Documents of files: formats, compression, ranges, and damage in one clause."""

from __future__ import annotations

import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from kalmix.training.shards import documents
from kalmix.training.shards.documents import FileSlice, file_kind, read_slice

ROWS = [{"text": text, "id": n} for n, text in enumerate(["a filter", "naïve \U0001f600", "", "two\nlines", "last"])]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def zstd(data: bytes) -> bytes:
    return pyarrow.compress(data, codec="zstd", asbytes=True)


def read(path: Path, column: str = "text") -> tuple[list[str], list[str]]:
    """Return the texts and the damage of a file."""
    kind = file_kind(path.name)
    assert kind is not None
    stop = pyarrow.parquet.ParquetFile(path).num_row_groups if kind == "parquet" else path.stat().st_size
    found = list(read_slice(FileSlice(str(path), kind, 0, stop), column))
    assert all(x.data == x.text.encode() for x in found)
    return [x.text for x in found if x.damage is None], [x.damage for x in found if x.damage is not None]


def parquet(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=2)


FORMATS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_bytes(LINES),
    "a.ndjson": lambda path: path.write_bytes(b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n\n").rstrip()),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES[:50]) + gzip.compress(LINES[50:])),
    "a.jsonl.xz": lambda path: path.write_bytes(lzma.compress(LINES[:50]) + lzma.compress(LINES[50:])),
    "a.json.zst": lambda path: path.write_bytes(zstd(LINES[:50]) + zstd(LINES[50:])),
    "a.parquet": parquet,
}


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_read_from_every_format(name: str, tmp_path: Path) -> None:
    FORMATS[name](tmp_path / name)
    assert read(tmp_path / name) == ([row["text"] for row in ROWS], [])
    (wrong,) = {x.split("; ")[1] for x in read(tmp_path / name, "body")[1]}
    assert wrong == "it has 'text', 'id'"


@pytest.mark.parametrize("name", ["a.md", "a.md.gz", "a.md.xz", "a.txt.zst"])
def test_long_texts_are_cut_at_line_breaks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a line of words\n" * 30 + "é" * 40 + "\nthe end"
    packs = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd}
    pack = packs[Path(name).suffix if name.count(".") > 1 else ""]
    (tmp_path / name).write_bytes(pack(b"\xef\xbb\xbf" + text.encode()))
    assert read(tmp_path / name) == ([text], [])
    monkeypatch.setattr(documents, "MAX_DOCUMENT", 33)
    found, damage = read(tmp_path / name)
    assert not damage and "".join(found) == text and max(len(x.encode()) for x in found) <= 33
    assert found[1].endswith("words\n")


def test_each_line_belongs_to_the_range_in_which_it_begins(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    for width in (1, 7, 40, len(LINES)):
        ranges = [(start, min(start + width, len(LINES))) for start in range(0, len(LINES), width)]
        found = [x for start, stop in ranges for x in read_slice(FileSlice(str(path), "jsonl", start, stop), "text")]
        assert [x.text for x in found] == [row["text"] for row in ROWS]
        assert not any(x.damage for x in found)


def test_row_groups_are_read_separately(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet")
    part = FileSlice(str(tmp_path / "a.parquet"), "parquet", 1, 2)
    assert [x.text for x in read_slice(part, "text")] == [row["text"] for row in ROWS[2:4]]


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


GOOD = b'{"text": "good"}\n'
MANY = b"".join(b'{"text": "%d good"}\n' % n for n in range(20_000))
DAMAGE = {
    # file, content, part of the clause, documents that are read nevertheless
    "no JSON": ("a.jsonl", GOOD + b"{oops\n" + GOOD, "whose line 2 is not JSON", 2),
    "nested": ("a.jsonl", GOOD + b"[" * 100_000 + b"\n" + GOOD, "whose line 2 is not JSON (nested too deep)", 2),
    "not an object": ("a.jsonl", GOOD + b"[1]\n", "whose line 2 has the type list in place of an object", 1),
    "no text": ("a.jsonl", b'{"text": 3}\n' + GOOD, "whose line 1 has the type int in place of a text", 1),
    "no UTF-8": ("a.jsonl", GOOD + b'{"text": "caf\xe9"}\n' + GOOD, "whose line 2 is not UTF-8 (byte 13)", 2),
    "half a pair": ("a.jsonl", GOOD + b'{"text": "\\ud800"}\n', "whose line 2 holds half of a surrogate pair", 1),
    "long line": ("a.jsonl", GOOD + b" " * 90_000 + b"\n" + GOOD, "whose line 2 has more than", 2),
    "half a gz": ("a.jsonl.gz", cut(gzip.compress(MANY)), "whose compressed data is damaged", None),
    "no gz": ("a.jsonl.gz", GOOD, "whose compressed data is damaged (Not a gzipped file", 0),
    "half an xz": ("a.jsonl.xz", cut(lzma.compress(MANY)), "whose compressed data is damaged", None),
    "no xz": ("a.jsonl.xz", GOOD, "whose compressed data is damaged (Input format not supported", 0),
    "half a zst": ("a.jsonl.zst", cut(zstd(MANY)), "cannot be read (Truncated compressed stream)", None),
    "no zst": ("a.jsonl.zst", GOOD, "which cannot be read", 0),
    "text of latin-1": ("a.txt", b"caf\xe9", "which is not UTF-8 (byte 3)", 0),
    "text of Windows": ("a.txt", "caf\xe9".encode("utf-16"), "which is UTF-16 in place of UTF-8", 0),
    "binary": ("a.txt", b"a\0b", "which is binary", 0),
    "half a gz text": ("a.md.gz", cut(gzip.compress(MANY)), "whose compressed data is damaged", 0),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_and_other_documents_are_read(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, content, clause, count = DAMAGE[case]
    if case == "long line":
        monkeypatch.setattr(documents, "MAX_LINE", 1000)
    (tmp_path / name).write_bytes(content)
    found, damage = read(tmp_path / name)
    assert len(damage) == 1 and clause in damage[0] and "\n" not in damage[0]
    assert len(found) == count if count is not None else all("good" in x for x in found)


def test_damaged_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet(path)
    whole = path.read_bytes()
    for content in (whole[:-1], b"", b"PAR1" * 9, whole[:4] + b"\xff" * 60 + whole[64:]):
        path.write_bytes(content)
        damage = [x.damage for x in read_slice(FileSlice(str(path), "parquet", 0, 3), "text") if x.damage is not None]
        assert damage and ("Parquet" in damage[0] or "cannot be read" in damage[0])
    pyarrow.parquet.write_table(pyarrow.table({"text": [b"bytes"]}), path)
    assert read(path)[1] == ["whose row 1 of row group 0 has the type bytes in place of a text"]


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: None])
def test_what_is_no_regular_file_is_not_opened(make: Callable, tmp_path: Path, in_time: None) -> None:
    make(tmp_path / "a.jsonl")
    (document,) = read_slice(FileSlice(str(tmp_path / "a.jsonl"), "jsonl", 0, 9), "text")
    assert document.damage is not None and "a.jsonl is " in document.damage
