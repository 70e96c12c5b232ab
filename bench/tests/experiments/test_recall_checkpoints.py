"""Trained models of benchmarks: kept, found again, and shown while they read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kalmix.errors import ArgumentError
from kalmix_bench.experiments.recall import Cell, Part, Protocol, Shape
from kalmix_bench.experiments.recall import beliefs as bench_beliefs
from kalmix_bench.experiments.recall.checkpoints import cell_of, kept, restored
from kalmix_bench.experiments.recall.data import draw
from kalmix_bench.experiments.recall.experiment import Recall
from kalmix_bench.runner.cells import Results
from kalmix_bench.runner.scheduler import run

COPY = Cell(
    "mad/selective-copying",
    (Part.of(32, 16, seq_len=16, num_tokens_to_copy=2, vocab_size=6),),
    "kla",
    Shape(8, state=64),
    Protocol(epochs=2, batch=16, rate=1e-2),
    0,
)
PRESSED = Cell(
    "mad/compression", (Part.of(32, 16, seq_len=8, vocab_size=6),), *(COPY.layer, COPY.shape), COPY.protocol, 1
)
DOUBTLESS = replace(COPY, layer="deltanet", shape=Shape(8))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    results = Results(tmp_path_factory.mktemp("bench") / "results.jsonl")
    run(Recall(), [COPY, PRESSED, DOUBTLESS], results, torch.device("cpu"))
    return results


def test_a_model_is_found_as_it_ended(results: Results):
    assert kept(results) == [cell_of(row) for row in results.read()]
    for cell, row in zip((COPY, PRESSED, DOUBTLESS), results.read(), strict=True):
        assert cell_of(row).written() == cell.written()
        drawn = draw(cell)
        test = drawn.parts[0].test
        with torch.no_grad():
            predicted = restored(cell, drawn, results)(torch.from_numpy(test.inputs)).argmax(-1).numpy()
        scored = test.targets != -100
        assert (predicted == test.targets)[scored].mean() == pytest.approx(row["curves"]["micro"][-1], abs=1e-5)
    with pytest.raises(ArgumentError, match="whose weights are missing"):
        restored(replace(COPY, seed=5), draw(COPY), results)


def test_pictures_of_what_they_believe(results: Results):
    """A picture of variances, and one of attention for each layer; none where nothing is doubted."""
    written = bench_beliefs.draw(COPY, results, 3)
    names = ["variance", "attention-layer-1"]
    assert [path.name for path in written] == [f"mad-selective-copying-kla-0-{name}.png" for name in names]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    assert bench_beliefs.draw(DOUBTLESS, results, 0) == []


def test_the_command(results: Results, capsys: pytest.CaptureFixture[str]):
    folder = results.path.parent
    bench_beliefs.run(folder, task=["compression"], layer=None, row=0, models=1)
    assert capsys.readouterr().out.count("mad-compression-kla-1") == 2
    mistakes: dict[str, Callable[[], None]] = {
        r"kla on mad/selective-copying": lambda: bench_beliefs.run(folder, layer=["mamba2"]),
        r"`output` .* no trained model": lambda: bench_beliefs.run(folder / "nowhere"),
        r"`row` is 16; expected below 16": lambda: bench_beliefs.run(folder, layer=["kla"], row=16),
        r"`layer` is deltanet; expected with a posterior": lambda: bench_beliefs.run(folder, layer=["deltanet"]),
    }
    for said, mistake in mistakes.items():
        with pytest.raises(ArgumentError, match=said):
            mistake()
