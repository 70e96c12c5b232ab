"""`kalmix_bench.perf.cells`: costs of a cell alone, in several processes at once, and its kernels."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import replace

import pytest
import torch

from kalmix_bench.experiments.recall.presets import BENCHES, make_cells
from kalmix_bench.perf import cells

CELL = "mad --preset laptop --task selective-copying --layer kla --depth 1 --device cpu"


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Return a function that runs the module with options, and returns what it prints."""
    monkeypatch.setattr(cells, "SECONDS", 0.01)
    monkeypatch.setattr(cells, "PROFILED", 1)

    def run(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["cells", *CELL.split(), *options])
        cells.main()
        return capsys.readouterr().out

    return run


@pytest.mark.slow
def test_a_cell_has_its_time_and_its_operations(measure) -> None:
    output = measure("--profile")
    assert re.search(r"selective-copying .* 1  +[\d.]+ ms a step", output) and "one seed of all" in output
    assert "aten::addmm" in output or "aten::mm" in output


@pytest.mark.slow
def test_processes_together_take_steps(measure) -> None:
    found = re.search(r"([\d,]+) steps a second of 2 processes together", measure("--together", "2"))
    assert found is not None and int(found[1].replace(",", "")) > 0


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_error_of_a_process_is_raised_at_once() -> None:
    (cell, *_) = make_cells(BENCHES["mad"]["laptop"], ["selective-copying"], ["kla"], 1)
    began = time.monotonic()
    with pytest.raises((RuntimeError, AssertionError), match=r"(?i)cuda"):
        cells.rate_together(cell, torch.device("cuda"), 2)
    assert time.monotonic() - began < cells.PREPARATION / 2


def test_batches_of_all_parts_score_as_many_tokens() -> None:
    """Parts of one length share a CUDA graph, which fits one number of scored tokens, whatever a part needs."""
    cell = make_cells(BENCHES["mqar"]["short"], ["update"], ["gated-deltanet"], 1)[0]
    small = replace(cell.shape, hidden_size=16, depth=1, state_size=128)
    pairs = [dict(part.settings)["num_kv_pairs"] for part in cell.parts]
    few = replace(cell, shape=small, protocol=replace(cell.protocol, batch_size=2))
    with cells._prepared(few, torch.device("cpu"), False) as (steps, _):
        scored = [step.args[1]["positions"].shape for step in steps]  # type: ignore[attr-defined]
    lengths = [dict(part.settings)["input_seq_len"] for part in cell.parts]
    assert len(set(pairs)) > 1 and len(scored) == len(pairs)
    assert len(set(zip(lengths, scored, strict=True))) == len(set(lengths))


def test_no_processes_are_refused(measure, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        measure("--together", "0")
    assert "--together is not positive" in capsys.readouterr().err
