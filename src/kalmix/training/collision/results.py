"""Finished cells as JSON lines, and running those that are missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import groupby

import torch

from kalmix.tasks.collision.models import Recaller
from kalmix.training.collision.protocol import STUDIES, Cell, Protocol
from kalmix.training.collision.trainer import Tell, coordinates, test, train
from kalmix.training.lines import Lines, Row
from kalmix.training.provenance import provenance

Follow = Callable[[str, str], Tell]


class Results(Lines):
    """Each row a cell with its scores."""

    def rows(self, protocol: Protocol) -> dict[Cell, Row]:
        """The cells that were run as `protocol` says; of several runs, the last."""
        found = {}
        for row in self.read():
            try:
                cell, same = Cell(row["study"], row["model"], row["seed"]), row["protocol"] == asdict(protocol)
            except (ValueError, LookupError, TypeError):
                continue
            if same:
                found[cell] = row
        return found


def run(
    cells: Iterable[Cell],
    protocol: Protocol,
    results: Results,
    device: torch.device,
    follow: Follow = lambda study, model: lambda done, loss: None,
) -> dict[Cell, Row]:
    """Run the cells that `results` lacks, the seeds of a model side by side, and give the rows of all that were asked.

    Args:
        follow: called with study and model as each begins; what it returns is told the part done and the mean loss.

    Raises:
        NonFiniteError: a loss diverged.
    """
    asked = list(dict.fromkeys(cells))
    known = results.rows(protocol)
    for (study, model), group in groupby([c for c in asked if c not in known], lambda c: (c.study, c.model)):
        seeds = [cell.seed for cell in group]
        results.add(_learn(study, model, seeds, protocol, device, follow(study, model)))
    known = results.rows(protocol)
    return {cell: known[cell] for cell in asked}


def _learn(study: str, model: str, seeds: list[int], protocol: Protocol, device: torch.device, tell: Tell) -> list[Row]:
    """Train and test; a row a seed."""
    began, what = time.monotonic(), STUDIES[study]
    writing = protocol.queries == "write"
    recaller = Recaller(model, what.task.inputs, what.task.labels, seeds, queries_write=writing).to(device)
    loss = train(recaller, what, seeds, protocol, device, tell)
    scores = [(coordinates(at), test(recaller, what, at, protocol, device)) for at in what.tests]
    shared = {"protocol": asdict(protocol), "beside": len(seeds), "seconds": round(time.monotonic() - began, 1)}
    return [
        {
            **asdict(Cell(study, model, seed)),
            **shared,
            **provenance(device),
            "loss": float(loss[member]),
            "scores": [at | {name: float(score[member]) for name, score in of.items()} for at, of in scores],
        }
        for member, seed in enumerate(seeds)
    ]
