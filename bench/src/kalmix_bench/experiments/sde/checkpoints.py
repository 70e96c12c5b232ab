"""Weights of trained predictors, stored next to the results."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from pickle import UnpicklingError

import torch

from kalmix.errors import ArgumentError
from kalmix_bench.datasets.sde.trajectories import Splits
from kalmix_bench.experiments.sde.protocol import SdeCell
from kalmix_bench.experiments.sde.trainer import TrainedPredictor, init_predictor
from kalmix_bench.runner.cells import Results


def weights(cell: SdeCell, results: Results) -> Path:
    """Return the path of the weights of a cell."""
    values = cell.to_dict()
    key = json.dumps([{n: values[n] for n in ("setting", "model", "seed")}, values["data_source"], values["protocol"]])
    return results.path.parent / "weights" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.pt"


def load_predictor(cell: SdeCell, data: Splits, results: Results, device: torch.device) -> TrainedPredictor:
    """Return the trained predictor of a cell.

    Args:
        cell: cell to load.
        data: trajectories that its setting draws.
        results: results next to which the weights are stored.
        device: device of the model.

    Raises:
        ArgumentError: the weights are damaged.
    """
    file = weights(cell, results)
    predictor = init_predictor(cell.model, data, cell.protocol, cell.seed, device)
    try:
        snapshots = torch.load(file, map_location=device, weights_only=True)
        predictor.model.load_state_dict(list(snapshots.values())[-1])
    except (OSError, EOFError, RuntimeError, UnpicklingError, AttributeError, TypeError, LookupError) as error:
        got, hint = f"{str(file)!r}, which is damaged ({error})", "Delete the file and run the cell again"
        raise ArgumentError("weights", got=got, expected=f"the weights of {cell}", hint=hint) from error
    return predictor._replace(validation=results.rows([cell])[cell]["validation"], snapshots=snapshots)
