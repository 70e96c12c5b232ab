"""Sources of documents, divided into parts that workers read independently.

The division depends on the source alone, so that the shards are the same for any number of workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from glob import glob, has_magic
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from kalmix.errors import ArgumentError
from kalmix.training.corpus import walk_files
from kalmix.training.shards.dataset_source import DATASET, DatasetOptions, DatasetSource
from kalmix.training.shards.documents import Document, FileSlice, Kind, file_kind, is_compressed, read_slice, row_groups
from kalmix.training.shards.parts import Part, Source, part_bytes

EXPECTED = "a folder or file of text, JSON lines or Parquet, or hf:NAME"


def open_source(names: Sequence[str], column: str, *, exclude: Path, dataset: DatasetOptions) -> Source:
    """Return the source with these names, which are read in this order.

    Args:
        names: paths of files or folders, also as patterns such as `b/*.parquet`; or `hf:` and the name of a dataset.
        column: column that holds the text, of all but plain text.
        exclude: folder that is not searched.
        dataset: options of all datasets.

    Raises:
        ArgumentError: there is no such file or folder, it holds no file that can be read, or is inside `exclude`; two
            names lead to one file, or `datasets` fails.
        ModuleNotFoundError: a package is missing.
    """
    exclude = exclude.resolve()
    found = [_expand(name, exclude) for name in names]
    if len(found) == 1 and len(found[0]) == 1 and not found[0][0].startswith(DATASET):
        (path,) = map(Path, found[0])
        return FileSource(str(path.absolute()), column, _list_files(path, exclude))
    sources, seen = list[Source](), set[str]()
    for is_dataset, group in groupby(found, lambda paths: paths[0].startswith(DATASET)):
        if is_dataset:
            for (name,) in group:
                _check_distinct([name], seen)
                sources.append(DatasetSource(name.removeprefix(DATASET), column, dataset))
        else:
            files = list[SourceFile]()
            for paths in group:
                more = _once(file.inside(path) for path in paths for file in _list_files(Path(path), exclude))
                _check_distinct([str(Path(file.name).resolve()) for file in more], seen)
                files += more
            sources.append(FileSource(str(Path.cwd()), column, tuple(files)))
    source = sources[0] if len(sources) == 1 else SourceList(tuple(sources))
    source.fingerprint()  # loads datasets
    return source


def _expand(name: str, exclude: Path) -> list[str]:
    """Return the paths that match a pattern; a name that is no pattern unchanged.

    Left out are files that a folder leaves out, folders without text files, and paths inside another match.
    """
    if name.startswith(DATASET) or not has_magic(name) or Path(name).exists():
        return [name]
    matches, found = sorted(glob(name, recursive=True)), dict[str, None]()  # noqa: PTH207 - it may be absolute
    for path in map(Path, matches):
        if path.resolve().is_relative_to(exclude) or any(str(parent) in found for parent in path.parents):
            continue
        if any(_walk(path, exclude)) if path.is_dir() else file_kind(path.name) and path.is_file():
            found[str(path)] = None
    if not found:
        if matches and all(Path(path).resolve().is_relative_to(exclude) for path in matches):
            _check_outside(Path(matches[0]), exclude)
        problem = "matches no text files" if matches else "matches no file"
        raise ArgumentError("source", got=f"{name!r}, which {problem}", expected=EXPECTED)
    return list(found)


def _once(files: Iterable[SourceFile]) -> list[SourceFile]:
    """Return the files of a pattern, each once: folders may match by several paths, such as `b/c/..` or a link."""
    folder = lru_cache(maxsize=None)(Path.resolve)
    found = dict[tuple[Path, str], SourceFile]()
    for file in files:
        path = Path(file.name)
        found.setdefault((folder(path.parent), path.name), file)
    return list(found.values())


def _check_distinct(names: Sequence[str], seen: set[str]) -> None:
    """Check that the names of one source are not in `seen`, and add them. A folder may hold links to its own files."""
    for name in names:
        if name in seen:
            raise ArgumentError("source", problem=f"names {name!r} twice", expected="each file and dataset once")
    seen.update(names)


class SourceFile(NamedTuple):
    """File of a source: path relative to the source, format, bytes, and time of its last change in nanoseconds."""

    name: str
    kind: Kind
    size: int
    changed: int

    def inside(self, folder: str) -> SourceFile:
        """Return the same file with `folder` before its name; the file `folder` itself if the name is "."."""
        return SourceFile(str(Path(folder, self.name)), *self[1:])


def _walk(folder: Path, exclude: Path) -> Iterator[str]:
    """Yield paths relative to `folder` of its files in formats that are read from a folder."""
    for name in walk_files(folder, lambda name: file_kind(name) is not None):
        if not (folder / name).resolve().is_relative_to(exclude):
            yield name


def _check_outside(source: Path, output: Path) -> None:
    """Check that a source is not inside the output folder, which is not searched."""
    if source.resolve().is_relative_to(output):
        got = f"{str(output)!r}, which holds the source {str(source)!r}"
        raise ArgumentError("output", got=got, expected="a folder without the source")


def _list_files(path: Path, exclude: Path) -> tuple[SourceFile, ...]:
    if path.is_dir():
        _check_outside(path, exclude)
        files = sorted(_walk(path, exclude))
    elif path.is_file():
        files = ["."]
    elif path.exists() or path.is_symlink():  # reading a FIFO or a device may never end
        raise ArgumentError("source", got=f"{str(path)!r}, which is not a regular file", expected=EXPECTED)
    else:
        raise ArgumentError("source", got=f"{str(path)!r}, which does not exist", expected=EXPECTED)
    if not files:
        raise ArgumentError("source", got=f"{str(path)!r}, which contains no text files", expected=EXPECTED)
    found = []
    for name in files:
        status = (path / name).stat()
        kind = file_kind((path / name).name) or "text"
        found.append(SourceFile(name, kind, status.st_size, status.st_mtime_ns))
    return tuple(found)


@dataclass(frozen=True)
class FileSource:
    """A file, all files of a folder, or several of them.

    Attributes:
        root: the file or folder; of several, the folder in which the command runs.
        column: column of JSON lines and Parquet.
        files: its files, by name.
    """

    root: str
    column: str
    files: tuple[SourceFile, ...]

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.name}\0{file.size} {file.changed}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def parts(self) -> list[Part]:
        limit = part_bytes(sum(file.size for file in self.files))
        parts, group, size = list[Part](), list[FileSlice](), 0
        for file in self.files:
            for piece, bytes_ in self._slices(file, limit):
                if group and size + bytes_ > limit:
                    parts.append(Part(len(parts), size, tuple(group)))
                    group, size = [], 0
                group.append(piece)
                size += bytes_
        return [*parts, Part(len(parts), size, tuple(group))]

    def _slices(self, file: SourceFile, limit: int) -> Iterator[tuple[FileSlice, int]]:
        """Yield the slices of a file with their bytes, each of about `limit` bytes where the format allows it."""
        path = str(Path(self.root, file.name))
        if file.kind == "parquet":
            start, size, groups = 0, 0, row_groups(path)
            for number, bytes_ in enumerate(groups):
                if size and size + bytes_ > limit:
                    yield FileSlice(path, file.kind, start, number), size
                    start, size = number, 0
                size += bytes_
            yield FileSlice(path, file.kind, start, len(groups)), size
        elif file.kind in ("json", "jsonl") and not is_compressed(path):
            for start in range(0, max(1, file.size), limit):
                stop = min(start + limit, file.size)
                yield FileSlice(path, file.kind, start, stop), stop - start
        else:
            yield FileSlice(path, file.kind, 0, file.size), file.size

    def read(self, part: Part) -> Iterator[tuple[str, Document]]:
        before = 0
        for piece in part.slices:
            position = 0
            for document in read_slice(piece, self.column):
                position = document.position
                yield repr(piece.path), Document(*document[:2], before + position, *document[3:])
            before += position


@dataclass(frozen=True)
class SourceList:
    """Several sources, one after the other.

    Attributes:
        sources: the sources.
    """

    sources: tuple[Source, ...]

    def fingerprint(self) -> str:
        return hashlib.sha256(" ".join(source.fingerprint() for source in self.sources).encode()).hexdigest()

    def parts(self) -> list[Part]:
        inner = [(n, part) for n, source in enumerate(self.sources) for part in source.parts()]
        return [Part(number, part.size, (n, part)) for number, (n, part) in enumerate(inner)]

    def read(self, part: Part) -> Iterator[tuple[str, Document]]:
        number, inner = part.slices
        return self.sources[number].read(inner)
