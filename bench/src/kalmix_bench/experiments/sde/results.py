"""Running the cells of the experiment; the weights that were learned lie beside the results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from kalmix.errors import ArgumentError
from kalmix.files import replacing
from kalmix_bench.datasets.sde.settings import SETTINGS
from kalmix_bench.datasets.sde.trajectories import Splits
from kalmix_bench.experiments.sde.protocol import REFERENCES, Cell
from kalmix_bench.experiments.sde.scores import errors
from kalmix_bench.experiments.sde.trainer import Learned, begin, learn
from kalmix_bench.runner import cells as kept
from kalmix_bench.runner import scheduler as sweep
from kalmix_bench.runner.cells import Row
from kalmix_bench.runner.scheduler import Tell


class Results(kept.Results):
    """Each row a cell with its errors; what a model has learned is in a file of its own."""

    def rows(self, cells: Iterable[Cell]) -> dict[Cell, Row]:
        """The cells that were run, and whose weights are still there."""
        found = super().rows(cells).items()
        return {cell: row for cell, row in found if cell.model == REFERENCES or self.weights(cell).exists()}

    def weights(self, cell: Cell) -> Path:
        """Where the weights of a cell are kept."""
        written = cell.written()
        told = json.dumps(
            [{n: written[n] for n in ("setting", "model", "seed")}, written["drawn"], written["protocol"]]
        )
        return self.path.parent / "weights" / f"{hashlib.sha256(told.encode()).hexdigest()[:16]}.pt"


def learned(cell: Cell, given: Splits, results: Results, device: torch.device) -> Learned:
    """Return a model that was run, with the weights that `results` keeps of it; `given` as its setting draws it.

    Raises:
        ArgumentError: the weights are damaged.
    """
    file = results.weights(cell)
    found = begin(cell.model, given, cell.protocol, cell.seed, device)
    try:
        kept = torch.load(file, map_location=device, weights_only=True)
        found.model.load_state_dict(list(kept.values())[-1])
    except (OSError, EOFError, RuntimeError, UnpicklingError, AttributeError, TypeError, LookupError) as error:
        raise ArgumentError("weights", got=f"{str(file)!r}, damaged ({error})", needs=f"those of {cell}") from error
    return found._replace(validation=results.rows([cell])[cell]["validation"], kept=kept)


def run(cells: Iterable[Cell], results: Results, device: torch.device, **options: Any) -> dict[Cell, Row]:
    """Run the cells that `results` lacks, and give the rows of all that were asked, in their order.

    Args:
        cells, results, device: what to run, where to keep it, and on what.
        options: jobs and follow, as `kalmix_bench.runner.scheduler.run` takes them.

    Raises:
        NonFiniteError: a loss diverged.
    """
    return sweep.run(cells, results, partial(find, results=results, device=device), device, **options)


def find(cells: tuple[Cell, ...], tell: Tell, results: Results, device: torch.device) -> list[Row]:
    """What one cell makes of its test trajectories."""
    (cell,) = cells
    setting, protocol = SETTINGS[cell.setting], cell.protocol
    given = setting.draw(protocol.sizes, cell.seed)
    if cell.model == REFERENCES:
        found = setting.references(given.test)
        tell(1.0, _error(found["last"]["measurement"]))
        return [{"errors": found}]
    made = learn(cell.model, given, protocol, cell.seed, device, lambda done, error: tell(done, _error(error)))
    with replacing(results.weights(cell)) as partial_file:
        torch.save(made.kept, partial_file)
    missed = errors(made.predict(given.test, protocol.batch), given.test)
    return [{"errors": {cell.model: missed}, "validation": made.validation}]


def _error(value: float) -> str:
    return f"error {value:.4g}"
