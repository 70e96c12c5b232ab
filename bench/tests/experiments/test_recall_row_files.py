"""Files of rows: they hold what a task draws, and rows are drawn once."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kalmix_bench import datasets
from kalmix_bench.experiments.recall import row_files
from kalmix_bench.experiments.recall.data import CellData, draw_cell_data
from kalmix_bench.experiments.recall.presets import BENCHES, make_cells
from kalmix_bench.experiments.recall.protocol import Part, RecallCell
from kalmix_bench.runner import cell_file


def cell(bench: str, task: str, **settings: object) -> RecallCell:
    """Return a cell with few rows, validation rows among them."""
    (first, *_) = make_cells(BENCHES[bench]["laptop"], [task], [], 1)
    parts = (Part.of(6, 3, **settings), Part.of(4, 0, **settings))
    return replace(first, parts=parts, protocol=replace(first.protocol, validation=2))


CELLS = (
    cell("mad", "selective-copying", seq_len=32, num_tokens_to_copy=4),
    cell("mqar", "update", vocab_size=64, input_seq_len=64, num_kv_pairs=4, num_updates=2),
    cell(
        "needle", "single-1", max_seq_length=512, tokens_to_generate=16, words="builtin"
    ),  # depths are metadata of rows
)


def same(one: datasets.Rows, two: datasets.Rows) -> bool:
    arrays = ((one.inputs, two.inputs), (one.targets, two.targets))
    facts = [(one.metadata[name], two.metadata[name]) for name in one.metadata]
    equal = all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in (*arrays, *facts))
    return equal and one.metadata.keys() == two.metadata.keys()


def assert_equal(one: CellData, two: CellData) -> None:
    assert one.vocab_size == two.vocab_size
    for a, b in zip(one.parts, two.parts, strict=True):
        assert same(a.train, b.train) and same(a.test, b.test) and a.settings == b.settings
    assert all(same(a, b) for a, b in zip(one.validation, two.validation, strict=True)) and len(one.validation) == 1


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.task)
def test_rows_of_a_file_are_those_that_a_task_draws(
    cell: RecallCell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = draw_cell_data(cell)
    assert_equal(draw_cell_data(cell, tmp_path), drawn)
    monkeypatch.setattr(row_files.PartRows, "draw", lambda self: pytest.fail("rows are drawn again"))
    assert_equal(draw_cell_data(cell, tmp_path), drawn)
    assert len(list(tmp_path.glob("*.npz"))) == 2


def test_other_rows_have_other_files(tmp_path: Path) -> None:
    first = CELLS[0]
    protocol = first.protocol
    others = (
        replace(first, protocol=replace(protocol, validation=0)),
        replace(first, protocol=replace(protocol, data_seed=7)),
        replace(first, parts=(replace(first.parts[0], train=5), first.parts[1])),
        replace(first, parts=(Part.of(6, 3, seq_len=36, num_tokens_to_copy=4), first.parts[1])),
    )
    for cell in (first, *others):
        draw_cell_data(cell, tmp_path)
    assert len(list(tmp_path.glob("*.npz"))) == 2 + 1 + 2 + 1 + 1


def test_the_command_draws_the_rows_of_a_cell_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command runs as the module does, but in this process, since a new one would import PyTorch."""
    cells = tmp_path / "cells.jsonl"
    cell_file.write([*CELLS, replace(CELLS[0], seed=1)], cells)  # the same rows: the data have their own seed
    monkeypatch.setattr(sys, "argv", ["row_files", str(cells), str(tmp_path / "data"), "--jobs", "2"])
    with pytest.warns(RuntimeWarning, match="found in sys.modules"):  # this process has imported it
        runpy.run_module(row_files.__name__, run_name="__main__", alter_sys=True)
    files = set((tmp_path / "data").glob("*.npz"))
    assert f"{len(files)} parts are in" in capsys.readouterr().out
    for cell in CELLS:
        draw_cell_data(cell, tmp_path / "data")
    assert set((tmp_path / "data").glob("*.npz")) == files
