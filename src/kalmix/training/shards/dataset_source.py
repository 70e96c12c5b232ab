"""Documents of a dataset that the package `datasets` loads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kalmix._extras import optional_imports
from kalmix.errors import ArgumentError
from kalmix.files import read_json
from kalmix.training.shards.columns import column_path, names, read_column
from kalmix.training.shards.documents import Document, from_value, schema_fields
from kalmix.training.shards.parts import MANY, Part, part_count

DATASET = "hf:"  # prefix of a source that the package `datasets` loads


class DatasetOptions(NamedTuple):
    """Options of `datasets.load_dataset`.

    Attributes:
        config: configuration.
        split: split.
        stream: stream the dataset in place of downloading it.
        revision: branch, tag or commit on the Hugging Face hub.
        data_files: files of the dataset to read, also as patterns such as `en/*.parquet`.
        data_dir: folder of the dataset to read.
    """

    config: str | None = None
    split: str = "train"
    stream: bool = False
    revision: str | None = None
    data_files: tuple[str, ...] = ()
    data_dir: str | None = None

    def files(self) -> dict[str, Any]:
        """Return the options that choose a revision or files, without those that are not set."""
        chosen = {"revision": self.revision, "data_files": list(self.data_files), "data_dir": self.data_dir}
        return {name: value for name, value in chosen.items() if value}

    def given(self) -> dict[str, Any]:
        """Return the options for JSON, without those of `files` that are not set."""
        return {"config": self.config, "split": self.split, "stream": self.stream, **self.files()}


@dataclass(frozen=True)
class DatasetSource:
    """A dataset that the package `datasets` loads: by name, or from a folder.

    Attributes:
        name: name on the Hugging Face hub, or path.
        column: column that holds the text.
        options: see `DatasetOptions`.
    """

    name: str
    column: str
    options: DatasetOptions

    def fingerprint(self) -> str:
        rows = None if self.options.stream else len(_load(self))
        return hashlib.sha256(repr((self.name, self.options, rows)).encode()).hexdigest()

    def parts(self) -> list[Part]:
        dataset = _load(self)
        if self.options.stream:
            return [Part(number, 0, (number,)) for number in range(dataset.num_shards)]
        count = part_count(dataset.data.nbytes, len(dataset))
        ends = [len(dataset) * number // count for number in range(count + 1)]
        return [Part(n, ends[n + 1] - ends[n], (range(ends[n], ends[n + 1]),)) for n in range(count)]

    def read(self, part: Part) -> Iterator[tuple[str, Document]]:
        dataset, (piece,) = _load(self), part.slices
        if self.options.stream:
            rows, first = dataset.shard(num_shards=dataset.num_shards, index=piece), 0
        else:
            rows, first = dataset.select(piece), piece.start
        name = repr(DATASET + self.name)
        shard = f" of shard {piece}" if self.options.stream else ""
        for position, row in enumerate(_read_rows(rows, name, first, shard), 1):
            place = f"whose row {first + position - 1}{shard}"
            yield name, from_value(read_column(row, self.column), position, place)


def _read_rows(rows: Any, name: str, first: int, shard: str) -> Iterator[dict[str, Any]]:
    """Yield rows of a dataset.

    Raises:
        OSError: `datasets` fails, for example because a connection is lost.
    """
    number = first
    try:
        for row in rows:
            yield row
            number += 1
    except Exception as error:  # of many classes
        where = f"after row {number - 1}{shard}" if number > first else f"before row {first}{shard}"
        problem = f"`datasets` failed to read {name} {where} ({_first_line(error)})"
        raise OSError(f"{problem}; repeat the command to continue") from error


@lru_cache(maxsize=8)
def _load(source: DatasetSource) -> Any:
    """Load a dataset, with the text column alone.

    Raises:
        ArgumentError: it cannot be loaded, or lacks the column.
    """
    with optional_imports():
        import datasets
    datasets.disable_progress_bars()
    config, split, stream, *_ = source.options
    files = source.options.files()
    got = repr(DATASET + source.name)
    try:
        folder = None if files else _saved_folder(source)
        if folder is not None:
            dataset: Any = datasets.load_from_disk(str(folder))
            shards = max(1, min(MANY, len(dataset)))
            dataset = dataset.to_iterable_dataset(num_shards=shards) if stream else dataset
        else:
            dataset = datasets.load_dataset(source.name, config, split=split, streaming=stream, **files)
        columns = schema_fields(dataset.features.arrow_schema) if dataset.features else next(iter(dataset))
    except ArgumentError:
        raise
    except Exception as error:  # of many classes
        problem = f"which `datasets` cannot load ({_first_line(error)})"
        raise ArgumentError("source", got=f"{got}, {problem}", expected="a dataset that it loads") from None
    path = column_path(columns, source.column)
    if path is None:
        got = f"{source.column!r}, which {got} lacks"
        raise ArgumentError("column", got=got, expected=f"one of its columns ({names(columns)})")
    return dataset.select_columns(path[0])


def _saved_folder(source: DatasetSource) -> Path | None:
    """Return the folder of the chosen split of a dataset that `save_to_disk` wrote; `None` for another dataset.

    A dataset that was saved without splits is "train", the default.

    Raises:
        ArgumentError: it has no such split, or a configuration is named, which a saved dataset does not have.
    """
    folder, options = Path(source.name), source.options
    single = all((folder / name).is_file() for name in ("dataset_info.json", "state.json"))
    if not single and not (folder / "dataset_dict.json").is_file():
        return None
    got = f"which {DATASET + source.name!r} lacks, as `save_to_disk` wrote it"
    if options.config is not None:
        raise ArgumentError("config", got=f"{options.config!r}, {got}", expected="no configuration")
    stored = read_json(folder / "state.json").get("_split") if single else None
    splits = [stored or "train"] if single else read_json(folder / "dataset_dict.json")["splits"]
    if options.split not in splits and not (single and options.split == "train"):
        raise ArgumentError("split", got=f"{options.split!r}, {got}", expected=" or ".join(map(repr, splits)))
    return folder if single else folder / options.split


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
