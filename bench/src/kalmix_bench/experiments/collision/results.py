"""Running the cells of the collision experiments, the seeds of a model side by side."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from kalmix_bench.experiments.collision.models import Recaller
from kalmix_bench.experiments.collision.protocol import STUDIES, Cell
from kalmix_bench.experiments.collision.trainer import coordinates, test, train
from kalmix_bench.runner import scheduler as sweep
from kalmix_bench.runner.cells import Results, Row
from kalmix_bench.runner.scheduler import Tell


def run(cells: Iterable[Cell], results: Results, device: torch.device, **options: Any) -> dict[Cell, Row]:
    """Run the cells that `results` lacks, and give the rows of all that were asked, in their order.

    Args:
        cells, results, device: what to run, where to keep it, and on what.
        options: jobs and follow, as `kalmix_bench.runner.scheduler.run` takes them.

    Raises:
        NonFiniteError: a loss diverged.
    """
    work = partial(learn, device=device)
    return sweep.run(cells, results, work, device, together=lambda c: (c.study, c.model, c.protocol), **options)


def learn(cells: tuple[Cell, ...], tell: Tell, device: torch.device) -> list[Row]:
    """Train and test cells that differ in their seeds."""
    (study, model, protocol), seeds = (cells[0].study, cells[0].model, cells[0].protocol), [cell.seed for cell in cells]
    what, writing = STUDIES[study], protocol.queries == "write"
    recaller = Recaller(model, what.task.inputs, what.task.labels, seeds, queries_write=writing).to(device)
    loss = train(recaller, what, seeds, protocol, device, lambda done, loss: tell(done, f"loss {loss:.3f}"))
    scores = [(coordinates(at), test(recaller, what, at, protocol, device)) for at in what.tests]
    return [
        {
            "beside": len(seeds),
            "loss": float(loss[member]),
            "scores": [at | {name: float(score[member]) for name, score in of.items()} for at, of in scores],
        }
        for member in range(len(seeds))
    ]
