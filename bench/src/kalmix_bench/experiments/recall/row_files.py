"""Files of a task's rows, so that cells with equal rows draw them once.

    python -m kalmix_bench.experiments.recall.row_files cells.jsonl FOLDER --jobs 16

draws the rows of all cells of a file, several parts at a time. `kalmix bench run --data FOLDER` reads them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock

from kalmix.files import replace_file
from kalmix_bench import datasets
from kalmix_bench.experiments.recall.cell_line import parse_cell
from kalmix_bench.experiments.recall.protocol import RecallCell
from kalmix_bench.runner import cell_file

PARTS, METADATA = ("train", "test"), "metadata"  # in the names of a file's arrays


class PartRows(NamedTuple):
    """Everything that defines the rows of one part of a cell.

    Attributes:
        task: a name of `kalmix_bench.datasets.make`.
        seed: seed of the rows.
        train, test: numbers of rows; `test` includes validation rows.
        settings: settings that differ from the task's baseline, by name.
    """

    task: str
    seed: int
    train: int
    test: int
    settings: tuple[tuple[str, Any], ...]

    def draw(self) -> datasets.Data:
        """Draw the rows."""
        return datasets.make(self.task, seed=self.seed, train=self.train, test=self.test, **dict(self.settings))


def parts_of(cell: RecallCell) -> Iterator[PartRows]:
    """Yield the rows of each part of a cell; each has its own seed. Validation rows follow the test rows."""
    protocol = cell.protocol
    first = cell.seed if protocol.data_seed is None else protocol.data_seed
    for place, part in enumerate(cell.parts):
        test = part.test + (protocol.validation if part.test else 0)
        yield PartRows(cell.task, first + place, part.train, test, part.settings)


def read_or_draw(rows: PartRows, folder: Path | None) -> datasets.Data:
    """Return rows, from their file in `folder` if there is one.

    Rows without a file are drawn and written. If another process is drawing them, this one waits for it.

    Args:
        rows: rows to return.
        folder: folder of files; `None` to draw.
    """
    if folder is None:
        return rows.draw()
    settings = datasets.get_task(rows.task).configure(**dict(rows.settings))
    about = json.dumps([*rows[:-1], asdict(settings)], sort_keys=True)
    path = folder / f"{hashlib.sha256(about.encode()).hexdigest()[:16]}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                data = rows.draw()
                with replace_file(path) as unfinished, unfinished.open("wb") as file:
                    np.savez(file, **dict(_arrays(data)))  # pyright: ignore[reportArgumentType]
                return data
    with np.load(path) as arrays:
        train, test = (_rows(arrays, part) for part in PARTS)
    return datasets.Data(train, test, settings.vocab_size, asdict(settings))


def _arrays(data: datasets.Data) -> Iterator[tuple[str, Any]]:
    """Yield the names and arrays of a file."""
    for part, rows in zip(PARTS, (data.train, data.test), strict=True):
        yield f"{part} inputs", rows.inputs
        yield f"{part} targets", rows.targets
        for name, values in rows.metadata.items():
            yield f"{part} {METADATA} {name}", values


def _rows(arrays: Mapping[str, Any], part: str) -> datasets.Rows:
    """Return the rows of a part of a file."""
    prefix = f"{part} {METADATA} "
    metadata = {name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)}
    return datasets.Rows(arrays[f"{part} inputs"], arrays[f"{part} targets"], metadata)


def draw_all(cells: Iterable[RecallCell], folder: Path, jobs: int) -> int:
    """Draw the rows of cells that have no file yet, in the order of the cells; return their number of parts."""
    parts = list(dict.fromkeys(part for cell in cells for part in parts_of(cell)))
    with multiprocessing.get_context("fork").Pool(min(jobs, len(parts))) as pool:
        for _ in pool.imap_unordered(partial(_draw, folder=folder), parts):
            pass
    return len(parts)


def _draw(rows: PartRows, folder: Path) -> None:
    read_or_draw(rows, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the rows of a cell file.")
    parser.add_argument("cells", type=Path, help="cell file, as `kalmix bench mad --write` writes it")
    parser.add_argument("folder", type=Path, help="folder of the files")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    given = parser.parse_args()
    count = draw_all(cell_file.read(given.cells, parse_cell), given.folder, max(1, given.jobs))
    print(f"{count} parts are in {given.folder}")


if __name__ == "__main__":
    main()
