"""What a sweep shows while it runs: what is running, how far all of it is, and how long is left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from kalmix_bench.runner.experiment import Tell
from kalmix_bench.runner.scheduler import Follow, Piece


@contextmanager
def progress(console: Console) -> Iterator[Follow]:
    """On a terminal a bar for each cell in hand and one for all; elsewhere a line when a cell is done."""
    columns = (TextColumn("{task.description}"), BarColumn(30), TaskProgressColumn(), TextColumn("{task.fields[told]}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        yield _Watch(console, bars).begin


class _Watch:
    """How far each cell of a sweep is, and all of them together."""

    def __init__(self, console: Console, bars: Progress) -> None:
        self.console, self.bars = console, bars
        self.began, self.parts = time.monotonic(), {}
        self.all = None

    def begin(self, piece: Piece, pieces: int) -> Tell:
        name = escape(str(piece[0]))
        if self.all is None:
            self.all = self.bars.add_task("[bold]all", total=float(pieces), told="")
        bar = self.bars.add_task(name, total=1.0, told="")
        self.parts[piece] = 0.0

        def tell(done: float, told: str) -> None:
            self.parts[piece] = done
            self.bars.update(bar, completed=done, told=told, visible=done < 1)
            finished = sum(part == 1 for part in self.parts.values())
            ahead = f"{finished}/{pieces}" + ("" if finished == pieces else f", {self.left(pieces)} left")
            if self.all is not None:
                self.bars.update(self.all, completed=sum(self.parts.values()), told=ahead)
            if done == 1:
                self.console.print(f"{name}  {told}  [dim]({ahead})", soft_wrap=True)

        return tell

    def left(self, pieces: int) -> str:
        """At the pace so far."""
        done = sum(self.parts.values())
        seconds = int((time.monotonic() - self.began) * (pieces - done) / max(done, 1e-3))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
