"""Base class of experiments: the interface by which the runner runs, resumes and reports cells."""

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
# Takes the fraction done (1 when the rows are written) and a short status; returns whether the cell must stop.
ProgressFn = Callable[[float, str], Any]


class CellStopped(Exception):  # noqa: N818 - not an error
    """Signal that a cell stored a checkpoint and stopped, because `on_progress` returned true."""


class Experiment(ABC, Generic[CellT]):
    """Base class of experiments: their commands, how a cell is run and resumed, and how rows are reported.

    `pickle` sends instances to other processes, so their attributes must be small.

    Args:
        commit: commit of kalmix for the rows, where git does not know it.

    Attributes:
        name: heading in a report.
        keys: keys that each of its rows has and that identify them among rows of other experiments.
        latest: two keys, or `None`. Among rows equal in the first key, only those count whose second key equals that of
            the last row, so that rows of different protocols are not mixed.
        in_all: whether `kalmix bench all` runs its commands.
        laptop: options of its commands that shorten `kalmix bench all --preset laptop`.
    """

    name: ClassVar[str]
    keys: ClassVar[frozenset[str]]
    latest: ClassVar[tuple[str, str] | None] = None
    in_all: ClassVar[bool] = True
    laptop: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, commit: str | None = None) -> None:
        self.commit: str | None = commit

    @abstractmethod
    def commands(self) -> dict[str, Callable[..., None]]:
        """Return its commands of `kalmix bench` by name."""

    @abstractmethod
    def run(
        self, cells: tuple[CellT, ...], results: Results, device: torch.device, on_progress: ProgressFn
    ) -> Sequence[Row]:
        """Run cells of one group, usually one cell, and return one row of results per cell.

        A run that takes minutes stores checkpoints next to `results` and resumes from them.

        Raises:
            CellStopped: `on_progress` returned true; a checkpoint was stored instead of a result.
        """

    def group_key(self, cell: CellT) -> Hashable:
        """Return a key that is equal for neighbouring cells that run together; by default each cell runs alone."""
        return cell

    def is_complete(self, cell: CellT, results: Results) -> bool:
        """Return whether all files of a finished cell exist."""
        return True

    def clear(self, cell: CellT, results: Results) -> None:
        """Delete the checkpoints of a cell; called after its row is written."""

    @abstractmethod
    def report(self, rows: Sequence[Row], output: Path, console: Console) -> list[Path]:
        """Print tables and draw figures of rows; return the paths of the files written."""

    @abstractmethod
    def findings(self, rows: Sequence[Row]) -> list[Finding]:
        """Return the numbers of rows that `report.csv` lists and that are compared with papers."""

    def report_run(self, rows: Mapping[CellT, Row], results: Results, output: Path, console: Console) -> list[Path]:
        """Report the cells of one run of a command, given its `results`; return the paths of the files written."""
        return self.report(list(rows.values()), output, console)

    def select(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows of this experiment that count (see `latest`)."""
        own_rows = [row for row in rows if self.keys <= row.keys()]
        if self.latest is None:
            return own_rows
        group_name, value_name = self.latest
        last = {row[group_name]: row[value_name] for row in own_rows}
        return [row for row in own_rows if row[value_name] == last[row[group_name]]]
