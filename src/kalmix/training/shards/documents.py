"""Documents of one file: plain text, JSON lines or Parquet, also compressed by gzip, xz or Zstandard.

Files are read in pieces, so that memory does not grow with their size.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from kalmix._extras import optional_imports
from kalmix.errors import FileError
from kalmix.files import check_regular
from kalmix.training.corpus import is_text, is_utf16
from kalmix.training.shards.columns import COLUMN_HINT, MISSING, column_path, names, read_column
from kalmix.training.shards.json_values import json_form, json_values

Kind = Literal["text", "json", "jsonl", "parquet"]  # "json": JSON lines, an array or an object
MAX_DOCUMENT = 1 << 24  # bytes; longer text files are cut at a line break
MAX_LINE = 1 << 28  # bytes of a line of JSON
_ROWS = 64  # of a Parquet file that are decoded at once
_COMPRESSED = {".gz", ".xz", ".zst"}
_LICENCES = "licences.json"  # written beside the texts by `kalmix_bench.datasets.package_texts`


class Document(NamedTuple):
    """One document, or the reason why it cannot be read.

    Attributes:
        text: its text.
        data: the text in UTF-8.
        position: bytes of the file, or rows of a dataset, read so far.
        damage: a clause such as "whose line 3 is not JSON" if it cannot be read; `text` is then empty.
        hint: advice on the damage, if another remedy than to leave the document out is likely.
        left_out: it is no damage that stops a preparation; the file holds no text.
    """

    text: str
    data: bytes
    position: int
    damage: str | None = None
    hint: str = ""
    left_out: bool = False


class FileSlice(NamedTuple):
    """Range of one file.

    Attributes:
        path: the file.
        kind: its format.
        start: first byte of JSON lines, or first row group of Parquet. Text and compressed files are read whole.
        stop: end of the range; a line belongs to the range in which it begins.
    """

    path: str
    kind: Kind
    start: int
    stop: int


def file_kind(name: str) -> Kind | None:
    """Return the format of a file by its name, `None` if it is no format that is read from a folder.

    JSON lines are `.jsonl` and `.ndjson`. A `.json` file may hold JSON lines, an array or an object.
    """
    path = Path(name.lower())
    compressed = path.suffix in _COMPRESSED
    inner = path.with_suffix("") if compressed else path
    if inner.suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    if inner.suffix == ".json":
        return None if path.name == _LICENCES else "json"
    if path.suffix == ".parquet":
        return "parquet"
    return "text" if is_text(inner.name) else None


def is_compressed(name: str) -> bool:
    """Return whether a file is compressed by gzip, xz or Zstandard, by its name."""
    return Path(name.lower()).suffix in _COMPRESSED


def read_slice(part: FileSlice, column: str) -> Iterator[Document]:
    """Yield the documents of a range of a file. After damage to the file as a whole, no more documents follow.

    Args:
        part: the range.
        column: column of JSON lines and Parquet that holds the text.

    Raises:
        ModuleNotFoundError: Parquet or Zstandard without pyarrow.
        OSError: the disk or the network fails.
    """
    position = 0
    try:
        check_regular(Path(part.path))
        readers = {"text": _read_text, "json": _read_json, "jsonl": _read_lines, "parquet": _read_parquet}
        reader = readers[part.kind]
        for document in reader(part, column):
            position = document.position
            yield document
    except FileError as error:
        yield _damage(f"where {error}", position)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        yield _damage(f"whose compressed data is damaged ({error})", position)
    except OSError as error:
        if not _is_damage(error):
            problem = f"{part.path!r} cannot be read ({error.strerror or error})"
            raise OSError(f"{problem}; repeat the command to continue") from error
        yield _damage(f"which cannot be read ({error.strerror or error})", position)


def _is_damage(error: OSError) -> bool:
    """Return whether the file is to blame, not the disk or the network. pyarrow gives no errno for damaged data."""
    return error.errno in (None, errno.EACCES, errno.EPERM)


def _damage(clause: str, position: int, hint: str = "") -> Document:
    return Document("", b"", position, clause, hint)


def decode(data: bytes, position: int, place: str = "which") -> Document:
    """Return the document with this text in UTF-8; one with `damage` if it is not UTF-8.

    Args:
        data: text in UTF-8.
        position: see `Document`.
        place: beginning of the clause on damage.
    """
    try:
        return Document(data.decode(), data, position)
    except UnicodeDecodeError as error:
        return _damage(f"{place} is not UTF-8 (byte {error.start})", position)


def from_value(value: Any, position: int, place: str) -> Document:
    """Return the document of a value in a column: a string, or `None`, which is an empty document.

    Args:
        value: the value, or `MISSING`.
        position: see `Document`.
        place: beginning of the clause on damage, such as "whose line 3".
    """
    if value is None:
        return Document("", b"", position)
    if value is MISSING:
        return _damage(f"{place} lacks the column", position, COLUMN_HINT)
    if isinstance(value, dict):
        clause = f"{place} holds an object with {names(value)} in place of a text"
        return _damage(clause, position, COLUMN_HINT)
    if not isinstance(value, str):
        return _damage(f"{place} has the type {type(value).__name__} in place of a text", position)
    try:
        return Document(value, value.encode(), position)
    except UnicodeEncodeError:
        return _damage(f"{place} holds half of a surrogate pair, which UTF-8 cannot encode", position)


@contextmanager
def _open(path: str) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Yield the decompressed contents of a file, and the file itself, whose position shows the progress."""
    with Path(path).open("rb") as raw:
        suffix = Path(path).suffix.lower()
        if suffix == ".gz":
            with gzip.open(raw) as file:
                yield file, raw  # pyright: ignore[reportReturnType]
        elif suffix == ".xz":
            with lzma.open(raw) as file:
                yield file, raw  # pyright: ignore[reportReturnType]
        elif suffix == ".zst":
            with optional_imports():
                import pyarrow
            stream: Any = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd")
            with io.BufferedReader(stream, 1 << 20) as file:
                yield file, raw  # pyright: ignore[reportReturnType]
        else:
            yield raw, raw


def _read_text(part: FileSlice, _: str) -> Iterator[Document]:
    with _open(part.path) as (file, raw):
        rest, first = b"", True
        while data := rest + file.read(MAX_DOCUMENT - len(rest)):
            if first and is_utf16(data):
                yield _damage("which is UTF-16 in place of UTF-8", raw.tell())
                return
            if first:
                data, first = data.removeprefix(b"\xef\xbb\xbf"), False
            cut = len(data) if len(data) < MAX_DOCUMENT else _cut(data)
            piece, rest = data[:cut], data[cut:]
            document = _damage("which is binary", raw.tell()) if b"\0" in piece else decode(piece, raw.tell())
            yield document
            if document.damage is not None:
                return


def _cut(data: bytes) -> int:
    """Return where to cut a long text: after the last line break in its second half, else between two characters."""
    line = data.rfind(b"\n", len(data) // 2)
    if line >= 0:
        return line + 1
    end = len(data) - 1
    while end > len(data) - 4 and data[end] & 0xC0 == 0x80:  # continues a character
        end -= 1
    return end


def _read_json(part: FileSlice, column: str) -> Iterator[Document]:
    """Yield the documents of a `.json` file: JSON lines, one array of objects, or one object.

    One object without a text in the column, and an array that does not begin with an object, are left out: a folder of
    code has such files.
    """
    with _open(part.path) as (file, _):
        form = json_form(file)
    if form == "lines":
        yield from _read_lines(part, column)
        return
    if part.start:  # the first range has all
        return
    hint, number = COLUMN_HINT, 0
    with _open(part.path) as (file, raw):
        for number, row in enumerate(json_values(io.TextIOWrapper(file, "utf-8-sig", newline="")), 1):
            table = isinstance(row, dict) and (form == "array" or isinstance(read_column(row, column), str))
            if number == 1 and not table:
                kind = f"one JSON object without a text in the column {column!r}"
                kind = kind if form == "object" else "a JSON array without objects"
                yield Document("", b"", raw.tell(), f"which is {kind}", left_out=True)
                return
            document = _from_row(row, raw.tell(), f"whose object {number}", column)
            hint = "" if document.damage is None else hint
            yield document if hint else Document(*document[:4])


def _read_lines(part: FileSlice, column: str) -> Iterator[Document]:
    whole = part.start == 0
    hint = COLUMN_HINT  # until a row has the column
    with _open(part.path) as (file, raw):
        offset = part.start
        if offset:
            offset = _next_line(file, offset)
        number = 0
        while offset < part.stop or is_compressed(part.path):
            line = file.readline(MAX_LINE)
            if not line:
                return
            begin, offset, number = offset, offset + len(line), number + 1
            position = raw.tell() if is_compressed(part.path) else offset - part.start
            place = f"whose line {number}" if whole else f"whose line at byte {begin}"
            if len(line) == MAX_LINE and not line.endswith(b"\n"):
                yield _damage(f"{place} has more than {MAX_LINE >> 20} MiB", position)
                offset = _next_line(file, offset)
                continue
            line = line.removeprefix(b"\xef\xbb\xbf") if begin == 0 else line
            if line.strip():
                document = _parse(line, position, place, column)
                hint = "" if document.damage is None else hint
                yield document if hint else Document(*document[:4])


def _next_line(file: IO[bytes], offset: int) -> int:
    """Move to the first line that begins at or after `offset`, and return where it begins."""
    if file.seekable() and file.tell() != offset:
        file.seek(offset - 1)
        offset -= 1
    while skipped := file.readline(1 << 20):
        offset += len(skipped)
        if skipped.endswith(b"\n"):
            break
    return offset


def _parse(line: bytes, position: int, place: str, column: str) -> Document:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return _damage(f"{place} is not UTF-8 (byte {error.start})", position)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else error
        return _damage(f"{place} is not JSON ({reason})", position)
    return _from_row(row, position, place, column)


def _from_row(row: Any, position: int, place: str, column: str) -> Document:
    """Return the document in a column of a JSON object."""
    if not isinstance(row, dict):
        return _damage(f"{place} has the type {type(row).__name__} in place of an object", position)
    value = read_column(row, column)
    if value is MISSING:
        return _damage(f"{place} lacks the column {column!r}; it has {names(row)}", position, COLUMN_HINT)
    return from_value(value, position, place)


def _read_parquet(part: FileSlice, column: str) -> Iterator[Document]:
    with optional_imports():
        import pyarrow
        import pyarrow.parquet
    try:
        with pyarrow.parquet.ParquetFile(part.path) as file:
            schema = schema_fields(file.schema_arrow)
            if column_path(schema, column) is None:
                clause = f"which lacks the column {column!r}; it has {names(schema)}"
                yield _damage(clause, 0, COLUMN_HINT)
                return
            groups = range(part.start, part.stop)
            sizes = [file.metadata.row_group(group).total_byte_size for group in groups]
            done = 0
            for group, size in zip(groups, sizes, strict=True):
                row = 0
                for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[column]):
                    for values in batch.to_pylist():  # other columns too, if their names begin so
                        row += 1
                        position = done + size * row // max(1, file.metadata.row_group(group).num_rows)
                        place = f"whose row {row} of row group {group}"
                        yield from_value(read_column(values, column), position, place)
                done += size
    except pyarrow.ArrowException as error:
        yield _damage(f"which is no intact Parquet file ({str(error).splitlines()[0]})", 0)


def schema_fields(columns: Any) -> dict[str, Any]:
    """Return the columns of a schema of pyarrow, or the fields of a struct, by name: a dict for a struct."""
    with optional_imports():
        import pyarrow
    return {x.name: schema_fields(x.type) if pyarrow.types.is_struct(x.type) else x.type for x in columns}


def row_groups(path: str) -> list[int]:
    """Return the bytes of each row group of a Parquet file; empty if it is damaged.

    Raises:
        ModuleNotFoundError: without pyarrow.
        OSError: the disk or the network fails.
    """
    with optional_imports():
        import pyarrow
        import pyarrow.parquet
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            return [file.metadata.row_group(n).total_byte_size for n in range(file.metadata.num_row_groups)]
    except pyarrow.ArrowException:  # reported when it is read
        return []
    except OSError as error:
        if _is_damage(error):
            return []
        raise OSError(f"{path!r} cannot be read ({error.strerror or error})") from error
