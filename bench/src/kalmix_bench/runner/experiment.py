"""The base class of experiments: what the runner needs to run, resume and report the cells of a study."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from rich.console import Console

from kalmix_bench.runner.cells import Cell, Results, Row
from kalmix_bench.runner.paper_claims import Finding

CellT = TypeVar("CellT", bound=Cell)
# Takes the fraction done, 1 when the rows are written, and a short status; returns whether the cell has to stop.
ProgressFn = Callable[[float, str], Any]


class CellStopped(Exception):  # noqa: N818 - nothing went wrong
    """A cell stored a checkpoint and stopped, because `tell` returned true."""


class Experiment(ABC, Generic[CellT]):
    """Base class of experiments: their commands, how one cell is run and resumed, and how rows are reported.

    An instance has no state of its own, so that `pickle` can send it to other processes.

    Attributes:
        name: heading of its part of a report.
        keys: names that every row of it has, and rows of other experiments lack.
        latest: two names. Of rows equal in the first, only those count that equal the last one in the second: rows of
            one study under several protocols are not mixed. All rows count if absent.
        in_all: whether `kalmix bench all` runs its commands.
        laptop: options of its commands that make `kalmix bench all --preset laptop` shorter.
    """

    name: ClassVar[str]
    keys: ClassVar[frozenset[str]]
    latest: ClassVar[tuple[str, str] | None] = None
    in_all: ClassVar[bool] = True
    laptop: ClassVar[Mapping[str, Any]] = {}

    @abstractmethod
    def commands(self) -> dict[str, Callable[..., None]]:
        """Return its commands of `kalmix bench`, by name."""

    @abstractmethod
    def run(
        self, cells: tuple[CellT, ...], results: Results, device: torch.device, on_progress: ProgressFn
    ) -> Sequence[Row]:
        """Run cells that belong together, mostly one, and return what was found of each.

        A run that takes minutes stores checkpoints beside `results`, and resumes from those it finds there.

        Raises:
            Stopped: `tell` returned true, so a checkpoint was stored in place of a result.
        """

    def group_key(self, cell: CellT) -> Hashable:
        """Return a value that is equal for neighbouring cells that are run together; by default each runs alone."""
        return cell

    def is_complete(self, cell: CellT, results: Results) -> bool:
        """Return whether the files that belong to a finished cell exist."""
        return True

    def clear(self, cell: CellT, results: Results) -> None:
        """Delete the checkpoints of a cell; called after its row is written."""

    @abstractmethod
    def report(self, rows: Sequence[Row], output: Path, console: Console) -> list[Path]:
        """Print tables of rows and draw pictures of them; return the paths of the files written."""

    @abstractmethod
    def findings(self, rows: Sequence[Row]) -> list[Finding]:
        """Return the numbers in rows that `report.csv` lists and that are compared with papers."""

    def report_run(self, rows: Mapping[CellT, Row], results: Results, output: Path, console: Console) -> list[Path]:
        """Report the cells of one run of a command, with `results` at hand; return the paths of the files written."""
        return self.report(list(rows.values()), output, console)

    def select(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows of this experiment that count (see `latest`)."""
        mine = [row for row in rows if self.keys <= row.keys()]
        if self.latest is None:
            return mine
        group_name, value_name = self.latest
        last = {row[group_name]: row[value_name] for row in mine}
        return [row for row in mine if row[value_name] == last[row[group_name]]]
