"""Trained models of benchmarks are stored, loaded and drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kalmix.errors import ArgumentError
from kalmix_bench.experiments.recall import ModelShape, Part, RecallCell, RecallProtocol
from kalmix_bench.experiments.recall import beliefs as bench_beliefs
from kalmix_bench.experiments.recall.checkpoints import cell_from_row, cells_with_weights, load_trained_model
from kalmix_bench.experiments.recall.data import draw_cell_data
from kalmix_bench.experiments.recall.experiment import Recall
from kalmix_bench.runner.cells import Results
from kalmix_bench.runner.scheduler import run

COPY = RecallCell(
    "mad/selective-copying",
    (Part.of(32, 16, seq_len=16, num_tokens_to_copy=2, vocab_size=6),),
    "kla",
    ModelShape(8, state_size=64),
    RecallProtocol(epochs=2, batch_size=16, learning_rate=1e-2),
    0,
)
PRESSED = RecallCell(
    "mad/compression", (Part.of(32, 16, seq_len=8, vocab_size=6),), *(COPY.layer, COPY.shape), COPY.protocol, 1
)
DOUBTLESS = replace(COPY, layer="deltanet", shape=ModelShape(8))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    results = Results(tmp_path_factory.mktemp("bench") / "results.jsonl")
    run(Recall(), [COPY, PRESSED, DOUBTLESS], results, torch.device("cpu"))
    return results


def test_trained_models_are_loaded(results: Results):
    assert cells_with_weights(results) == [cell_from_row(row) for row in results.read()]
    for cell, row in zip((COPY, PRESSED, DOUBTLESS), results.read(), strict=True):
        assert cell_from_row(row).to_dict() == cell.to_dict()
        drawn = draw_cell_data(cell)
        test = drawn.parts[0].test
        with torch.no_grad():
            predicted = load_trained_model(cell, drawn, results)(torch.from_numpy(test.inputs)).argmax(-1).numpy()
        scored = test.targets != -100
        assert (predicted == test.targets)[scored].mean() == pytest.approx(row["curves"]["micro"][-1], abs=1e-5)
    with pytest.raises(ArgumentError, match="whose weights are missing"):
        load_trained_model(replace(COPY, seed=5), draw_cell_data(COPY), results)


@pytest.mark.slow
def test_beliefs_are_drawn(results: Results):
    """A picture of variances, and one of attention for each layer; none where nothing is doubted."""
    written = bench_beliefs.draw(COPY, results, 3)
    names = ["variance", "attention-layer-1"]
    assert [path.name for path in written] == [f"mad-selective-copying-kla-0-{name}.png" for name in names]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    assert bench_beliefs.draw(DOUBTLESS, results, 0) == []


@pytest.mark.slow
def test_the_command(results: Results, capsys: pytest.CaptureFixture[str]):
    folder = results.path.parent
    bench_beliefs.run(folder, task=["compression"], layer=None, row=0, models=1)
    assert capsys.readouterr().out.count("mad-compression-kla-1") == 2
    mistakes: dict[str, Callable[[], None]] = {
        r"kla on mad/selective-copying": lambda: bench_beliefs.run(folder, layer=["mamba2"]),
        r"`output` .* no trained model": lambda: bench_beliefs.run(folder / "nowhere"),
        r"`row` is 16; expected below 16": lambda: bench_beliefs.run(folder, layer=["kla"], row=16),
        r"`layer` is deltanet, which has no posterior; expected": lambda: bench_beliefs.run(folder, layer=["deltanet"]),
    }
    for said, mistake in mistakes.items():
        with pytest.raises(ArgumentError, match=said):
            mistake()
