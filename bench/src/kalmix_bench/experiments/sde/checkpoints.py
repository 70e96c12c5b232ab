"""Weights that models of the experiment learned; they lie beside the results."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from pickle import UnpicklingError

import torch

from kalmix.errors import ArgumentError
from kalmix_bench.datasets.sde.trajectories import Splits
from kalmix_bench.experiments.sde.protocol import Cell
from kalmix_bench.experiments.sde.trainer import Learned, begin
from kalmix_bench.runner.cells import Results


def weights(cell: Cell, results: Results) -> Path:
    """Return the path of the weights of a cell."""
    written = cell.written()
    told = json.dumps([{n: written[n] for n in ("setting", "model", "seed")}, written["drawn"], written["protocol"]])
    return results.path.parent / "weights" / f"{hashlib.sha256(told.encode()).hexdigest()[:16]}.pt"


def learned(cell: Cell, given: Splits, results: Results, device: torch.device) -> Learned:
    """Return a model that was run, with the weights that `results` keeps of it; `given` as its setting draws it.

    Raises:
        ArgumentError: the weights are damaged.
    """
    file = weights(cell, results)
    found = begin(cell.model, given, cell.protocol, cell.seed, device)
    try:
        kept = torch.load(file, map_location=device, weights_only=True)
        found.model.load_state_dict(list(kept.values())[-1])
    except (OSError, EOFError, RuntimeError, UnpicklingError, AttributeError, TypeError, LookupError) as error:
        raise ArgumentError("weights", got=f"{str(file)!r}, damaged ({error})", expected=f"those of {cell}") from error
    return found._replace(validation=results.rows([cell])[cell]["validation"], kept=kept)
