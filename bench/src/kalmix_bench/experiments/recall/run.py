"""Running the cells of the benchmarks."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kalmix.errors import NonFiniteError
from kalmix_bench import datasets as tasks
from kalmix_bench.experiments.recall.checkpoints import keep
from kalmix_bench.experiments.recall.data import draw
from kalmix_bench.experiments.recall.layers import state_size
from kalmix_bench.experiments.recall.models import AutoEncoder, build
from kalmix_bench.experiments.recall.protocol import Cell
from kalmix_bench.experiments.recall.trainer import learn
from kalmix_bench.runner import scheduler as sweep
from kalmix_bench.runner.cells import Results, Row, digest
from kalmix_bench.runner.scheduler import Tell


def run(cells: Iterable[Cell], results: Results, device: torch.device, **options: Any) -> dict[Cell, Row]:
    """Run the cells that `results` lacks, and give the rows of all that were asked, in their order.

    A run that takes minutes leaves checkpoints beside the results while it lasts, and goes on from them. A run that
    diverges is finished: its row has `diverged` instead of scores. The weights that a run ended with are kept, its
    checkpoints are deleted once its row is written.

    Args:
        cells, results, device: what to run, where to keep it, and on what.
        options: jobs and follow, as `kalmix_bench.runner.scheduler.run` takes them.

    Raises:
        ArgumentError: a cell's layer does not take the size that its shape gives it.
    """
    work, clear = partial(find, results=results, device=device), partial(_clear, results=results)
    return sweep.run(cells, results, work, device, clear=clear, **options)


def _checkpoints(cell: Cell, results: Results) -> Path:
    return results.path.parent / "checkpoints" / digest(cell)


def _clear(cell: Cell, results: Results) -> None:
    shutil.rmtree(_checkpoints(cell, results), ignore_errors=True)


def find(cells: tuple[Cell, ...], tell: Tell, results: Results, device: torch.device) -> list[Row]:
    """What a layer makes of a task: scores at the epoch that the protocol chooses, curves, sizes and speed."""
    (cell,) = cells
    drawn, from_last = draw(cell), tasks.task(cell.task).from_last
    length = drawn.parts[0].test.inputs.shape[1]
    with one_order(device):
        with torch.random.fork_rng():
            torch.manual_seed(cell.seed)
            model = build(drawn.vocab_size, cell.shape, cell.layer, length, from_last=from_last)
        mixer = (model.encoder if isinstance(model, AutoEncoder) else model).model.mixers[0]
        sizes = {
            "parameters": sum(x.numel() for x in model.parameters()),
            "layer_parameters": sum(x.numel() for x in mixer.parameters()),
            "state": state_size(mixer),
        }
        try:
            judge = learn(cell, drawn, model.to(device), device, tell, _checkpoints(cell, results))
        except NonFiniteError as error:
            tell(1.0, f"diverged ({error})")
            return [{**sizes, "diverged": str(error)}]
    keep(cell, model, results)
    epochs, tokens = len(judge.curves["loss"]), sum(part.train.inputs.size for part in drawn.parts)
    chosen, on_test = judge.slices[cell.protocol.chosen], judge.slices.get(f"{cell.protocol.chosen} on test")
    return [
        {
            **sizes,
            "score": judge.main,
            "scores": judge.means(chosen),
            **({} if on_test is None else {"test_chosen_scores": judge.means(on_test)}),
            "slices": judge.slices,
            "curves": {name: [float(f"{value:.6g}") for value in curve] for name, curve in judge.curves.items()},
            "epochs": epochs,
            "training_seconds": round(judge.seconds["training"], 2),
            "judging_seconds": round(judge.seconds["judging"], 2),
            "tokens_per_second": round(epochs * tokens / max(judge.seconds["training"], 1e-9)),
        }
    ]


@contextmanager
def one_order(device: torch.device) -> Iterator[None]:
    """Sums are in one order, so that a seed gives the same numbers again, whatever runs beside it.

    On a CPU a cell takes one core. On a GPU it takes PyTorch's deterministic algorithms; of an operation that has none,
    PyTorch warns.
    """
    memory: Any = torch.utils.deterministic
    threads, blank = torch.get_num_threads(), memory.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = False  # nothing is read before it is written
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = blank
