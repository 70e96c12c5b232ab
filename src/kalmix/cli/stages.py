"""Progress bar of work in named stages. `progress` has that of training, and imports transformers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

_PAUSE = 10.0  # seconds between two lines of a stage if the output is no terminal


@contextmanager
def stages(console: Console) -> Iterator[Callable[..., None]]:
    """Show a bar for the current stage on a terminal; elsewhere print a line when a stage begins and every 10 seconds.

    Yields:
        A function of the stage's name, the fraction done, 0 to 1, and optionally a text to show beside it.
    """
    columns = (SpinnerColumn("line"), BarColumn(30), TaskProgressColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task, current, printed = bar.add_task("", total=1.0), "", 0.0

        def update(stage: str, done: float, detail: str = "") -> None:
            nonlocal current, printed
            bar.update(task, description=f"{stage}  {detail}".rstrip(), completed=done)
            if bar.disable and (stage != current or time.monotonic() - printed >= _PAUSE):
                console.print(f"{stage}: {done:.0%}  {detail}".rstrip() if stage == current else stage, soft_wrap=True)
                printed = time.monotonic()
            current = stage

        yield update
