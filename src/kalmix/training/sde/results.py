"""Finished cells as JSON lines with the weights beside them, and running those that are missing."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import torch

from kalmix.tasks.sde.scores import errors
from kalmix.tasks.sde.settings import SETTINGS
from kalmix.tasks.sde.trajectories import Splits
from kalmix.training.lines import Lines, Row
from kalmix.training.provenance import provenance
from kalmix.training.sde.protocol import REFERENCES, Cell, Protocol
from kalmix.training.sde.trainer import Learned, Tell, begin, learn

Follow = Callable[[str, str, int], Tell]


class Results(Lines):
    """Each row a cell with its errors; what a model has learned is in a file of its own."""

    def rows(self, protocol: Protocol) -> dict[Cell, Row]:
        """The cells that were run as `protocol` says, and whose weights are still there; of several runs, the last."""
        found = {}
        for row in self.read():
            try:
                cell = Cell(row["setting"], row["model"], row["seed"])
                same = row["protocol"] == asdict(protocol) and row["drawn"] == SETTINGS[cell.setting].written()
            except (ValueError, LookupError, TypeError):
                continue
            if same and (cell.model == REFERENCES or self.weights(cell, protocol).exists()):
                found[cell] = row
        return found

    def weights(self, cell: Cell, protocol: Protocol) -> Path:
        """Where the weights of a cell are kept."""
        told = json.dumps([asdict(cell), SETTINGS[cell.setting].written(), asdict(protocol)])
        return self.path.parent / "weights" / f"{hashlib.sha256(told.encode()).hexdigest()[:16]}.pt"


def learned(cell: Cell, given: Splits, protocol: Protocol, results: Results, device: torch.device) -> Learned:
    """A model that was run, with the weights that `results` keeps of it; `given` as its setting draws it."""
    kept = torch.load(results.weights(cell, protocol), map_location=device)
    found = begin(cell.model, given, protocol, cell.seed, device)
    found.model.load_state_dict(list(kept.values())[-1])
    return found._replace(validation=results.rows(protocol)[cell]["validation"], kept=kept)


def run(
    cells: Iterable[Cell],
    protocol: Protocol,
    results: Results,
    device: torch.device,
    follow: Follow = lambda setting, model, seed: lambda done, error: None,
) -> dict[Cell, Row]:
    """Run the cells that `results` lacks, and give the rows of all that were asked, in their order.

    Args:
        follow: called with setting, model and seed as each begins; what it returns is told the part done and the error.

    Raises:
        NonFiniteError: a loss diverged.
    """
    asked = list(dict.fromkeys(cells))
    known = results.rows(protocol)
    for cell in asked:
        if cell not in known:
            tell = follow(cell.setting, cell.model, cell.seed)
            results.add([_found(cell, protocol, results.weights(cell, protocol), device, tell)])
    known = results.rows(protocol)
    return {cell: known[cell] for cell in asked}


def _found(cell: Cell, protocol: Protocol, weights: Path, device: torch.device, tell: Tell) -> Row:
    began, setting = time.monotonic(), SETTINGS[cell.setting]
    given = setting.draw(protocol.sizes, cell.seed)
    if cell.model == REFERENCES:
        found = {"errors": setting.references(given.test)}
        tell(1.0, found["errors"]["last"]["measurement"])
    else:
        made = learn(cell.model, given, protocol, cell.seed, device, tell)
        weights.parent.mkdir(parents=True, exist_ok=True)
        torch.save(made.kept, weights)
        missed = errors(made.predict(given.test, protocol.batch), given.test)
        found = {"errors": {cell.model: missed}, "validation": made.validation}
    return {
        **asdict(cell),
        "drawn": setting.written(),
        "protocol": asdict(protocol),
        "seconds": round(time.monotonic() - began, 1),
        **provenance(device),
        **found,
    }
