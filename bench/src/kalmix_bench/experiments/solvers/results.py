"""Running the studies of solvers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from kalmix_bench.experiments.solvers.protocol import STUDIES, Cell
from kalmix_bench.runner import scheduler as sweep
from kalmix_bench.runner.cells import Results, Row
from kalmix_bench.runner.scheduler import Tell


def run(cells: Iterable[Cell], results: Results, device: torch.device, **options: Any) -> dict[Cell, Row]:
    """Run the cells that `results` lacks, and give the rows of all that were asked, in their order.

    Args:
        cells, results, device: what to run, where to keep it, and on what.
        options: jobs and follow, as `kalmix_bench.runner.scheduler.run` takes them.
    """
    return sweep.run(cells, results, partial(study, device=device), device, **options)


def study(cells: tuple[Cell, ...], tell: Tell, device: torch.device) -> list[Row]:
    """What one study finds."""
    (cell,) = cells
    return [{"found": STUDIES[cell.study](cell.setting, cell.seed, device, tell)}]
