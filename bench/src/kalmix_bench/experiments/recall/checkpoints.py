"""Weights of trained models, stored next to the results of their cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_model, save_model

from kalmix.errors import ArgumentError, FileError
from kalmix.files import replace_file
from kalmix.models.folder import check_finite
from kalmix_bench import datasets
from kalmix_bench.experiments.recall.data import CellData
from kalmix_bench.experiments.recall.model_shape import ModelShape
from kalmix_bench.experiments.recall.models import AutoEncoder, TokenModel, build
from kalmix_bench.experiments.recall.protocol import Part, RecallCell, RecallProtocol
from kalmix_bench.runner.cells import Results, Row, digest


def save_weights(cell: RecallCell, model: TokenModel | AutoEncoder, results: Results) -> None:
    """Store the final weights of a cell."""
    with replace_file(_file(cell, results)) as partial:
        save_model(model, str(partial))


def cells_with_weights(results: Results) -> list[RecallCell]:
    """Return the finished cells whose weights exist, oldest first."""
    try:
        cells = [cell_from_row(row) for row in results.read() if "parts" in row]
    except (LookupError, TypeError, AttributeError) as error:
        got = f"{str(results.path)!r}, with a row that is not a benchmark's ({error})"
        raise ArgumentError("results", got=got, expected="a file that `kalmix bench` wrote") from error
    return [cell for cell in dict.fromkeys(cells) if _file(cell, results).exists()]


def load_trained_model(cell: RecallCell, data: CellData, results: Results) -> TokenModel | AutoEncoder:
    """Return the trained model of a cell on the CPU, in evaluation mode.

    Args:
        cell: cell to load.
        data: its rows.
        results: results next to which the weights are stored.

    Raises:
        ArgumentError: the weights are missing or damaged.
    """
    file, length = _file(cell, results), data.parts[0].test.inputs.shape[1]
    if not file.exists():
        hint = "Run it again"
        raise ArgumentError("cell", got=f"{cell}, whose weights are missing", expected=f"one with {file}", hint=hint)
    model = build(data.vocab_size, cell.shape, cell.layer, length, from_last=datasets.get_task(cell.task).from_last)
    try:
        load_model(model, file)
        check_finite(model)
    except (OSError, SafetensorError, RuntimeError, FileError) as error:
        got, hint = f"{str(file)!r}, which is damaged ({error})", "Delete the file and run the cell again"
        raise ArgumentError("weights", got=got, expected=f"the weights of {cell}", hint=hint) from error
    return model.eval()


def cell_from_row(row: Row) -> RecallCell:
    """Return the cell of a row of results."""
    parts = tuple(Part.of(part["train"], part["test"], **part["settings"]) for part in row["parts"])
    shape, protocol = ModelShape(**_tuples(row["shape"])), RecallProtocol(**_tuples(row["protocol"]))
    return RecallCell(row["task"], parts, row["layer"], shape, protocol, row["seed"])


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    """Return a mapping with lists converted to tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _file(cell: RecallCell, results: Results) -> Path:
    return results.path.parent / "models" / f"{digest(cell)}.safetensors"
