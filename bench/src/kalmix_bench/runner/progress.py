"""Progress display of a sweep: running cells, completed fraction and remaining time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from kalmix_bench.runner.experiment import ProgressFn
from kalmix_bench.runner.scheduler import Batch, ProgressFactory


@contextmanager
def progress(console: Console) -> Iterator[ProgressFactory]:
    """Show a progress bar per running cell and one for the sweep on a terminal; elsewhere print a line per finished
    cell.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(30),
        TaskProgressColumn(),
        TextColumn("{task.fields[status]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        yield _SweepProgress(console, bars).begin


class _SweepProgress:
    """Progress of the cells of a sweep, and of the sweep."""

    def __init__(self, console: Console, bars: Progress) -> None:
        self.console, self.bars = console, bars
        self.began, self.fractions = time.monotonic(), {}
        self.all = None

    def begin(self, batch: Batch, batches: int) -> ProgressFn:
        name = escape(str(batch[0]))
        if self.all is None:
            self.all = self.bars.add_task("[bold]all", total=float(batches), status="")
        bar = self.bars.add_task(name, total=1.0, status="")
        self.fractions[batch] = 0.0

        def report(done: float, status: str) -> None:
            self.fractions[batch] = done
            self.bars.update(bar, completed=done, status=status, visible=done < 1)
            finished = sum(fraction == 1 for fraction in self.fractions.values())
            summary = f"{finished}/{batches}" + ("" if finished == batches else f", {self.time_left(batches)} left")
            if self.all is not None:
                self.bars.update(self.all, completed=sum(self.fractions.values()), status=summary)
            if done == 1:
                self.console.print(f"{name}  {status}  [dim]({summary})", soft_wrap=True)

        return report

    def time_left(self, batches: int) -> str:
        """Return the remaining time at the average speed so far."""
        done = sum(self.fractions.values())
        seconds = int((time.monotonic() - self.began) * (batches - done) / max(done, 1e-3))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
