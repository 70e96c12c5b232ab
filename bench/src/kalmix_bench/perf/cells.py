"""Measure the time and memory of the cells of `kalmix bench`: per step, per epoch, and of a whole preset.

    python -m kalmix_bench.perf.cells mad --layer kla --layer gla        # of the preset `paper`, on a GPU
    python -m kalmix_bench.perf.cells mqar --task update --hidden-size 128
    python -m kalmix_bench.perf.cells mad --preset laptop --device cpu

Prints, for each cell that differs in more than learning rate, weight decay or seed: milliseconds of a training step
(forward and backward, the minimum of many), seconds per epoch, peak GPU memory, and seconds until the first two steps
of each kind were done (with compilation). Then prints the hours of one seed with all learning rates and weight decays
if
every cell ran all epochs; without evaluation, AdamW, the Trainer's overhead, and early stopping.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from kalmix.errors import ArgumentError
from kalmix_bench import datasets
from kalmix_bench.experiments.recall.data import Batches, draw_cell_data
from kalmix_bench.experiments.recall.models import build
from kalmix_bench.experiments.recall.presets import BENCHES, make_cells
from kalmix_bench.experiments.recall.protocol import RecallCell
from kalmix_bench.experiments.recall.trainer import train_cell
from kalmix_bench.runner.determinism import deterministic_mode

SECONDS = 0.3  # time for repeating a step
GIB = 2**30


class Cost(NamedTuple):
    """Milliseconds per step of each trained part, seconds per epoch, peak bytes, seconds of the first steps."""

    ms: list[float]
    epoch: float
    peak: int
    first: float


def cost(cell: RecallCell, device: torch.device) -> Cost:
    """Train on two batches of each part, then time one step of each."""
    batch = cell.protocol.batch_size
    few = replace(
        cell,
        parts=tuple(replace(part, train=min(part.train, 2 * batch), test=min(part.test, 16)) for part in cell.parts),
        protocol=replace(cell.protocol, epochs=1, shuffle=False),
    )
    data = draw_cell_data(few)
    length = data.parts[0].test.inputs.shape[1]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with deterministic_mode(device):
        torch.manual_seed(0)
        model = build(data.vocab_size, cell.shape, cell.layer, length, from_last=datasets.get_task(cell.task).from_last)
        began = time.perf_counter()
        trainer = train_cell(few, data, model.to(device), device, lambda *_: None).trainer
        first = time.perf_counter() - began
        assert trainer is not None
        parts = [data._replace(parts=[part]) for part in data.parts if len(part.train)]
        inputs = [next(iter(Batches(part, batch, shuffle=False, seed=0, device=device))) for part in parts]
        ms = [_least(partial(trainer.training_step, model, rows), device) for rows in inputs]
    steps = [-(-part.train // batch) for part in cell.parts if part.train]
    epoch = sum(count * x for count, x in zip(steps, ms, strict=True)) / 1e3
    return Cost(ms, epoch, torch.cuda.max_memory_allocated() if device.type == "cuda" else 0, first)


def _least(step: Callable[[], object], device: torch.device) -> float:
    """Return the minimum time of a step in milliseconds."""
    times: list[float] = []
    deadline = time.perf_counter() + SECONDS
    while len(times) < 3 or time.perf_counter() < deadline:
        began = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times) * 1e3


def representative(cell: RecallCell) -> RecallCell:
    """Return the cell whose steps are timed for all cells that differ only in learning rate, weight decay and seed."""
    return replace(cell, protocol=replace(cell.protocol, learning_rate=1e-3, weight_decay=0.0), seed=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", choices=BENCHES)
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--task", action="append", default=[])
    parser.add_argument("--layer", action="append", default=[])
    parser.add_argument("--hidden-size", action="append", type=int, default=[])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    studies = BENCHES[arguments.bench][arguments.preset]
    counts = Counter(
        map(representative, make_cells(studies, arguments.task, arguments.layer, 1, arguments.hidden_size))
    )
    hours = 0.0
    for cell, count in counts.items():
        parts = " ".join(f"{name}={value}" for name, value in cell.parts[0].settings)
        title = f"{cell.task} {parts}  {cell.layer}  {cell.shape.hidden_size} x {cell.shape.depth}"
        try:
            costs = cost(cell, torch.device(arguments.device))
        except (torch.OutOfMemoryError, ArgumentError) as error:
            print(f"{title:70s} {type(error).__name__}: {str(error).splitlines()[0][:60]}", flush=True)
            torch.cuda.empty_cache()
            continue
        hours += count * cell.protocol.epochs * costs.epoch / 3600
        steps = " ".join(f"{ms:.2f}" for ms in costs.ms)
        print(
            f"{title:70s} {steps:>8s} ms a step {costs.epoch:8.2f} s an epoch {costs.peak / GIB:6.1f} GiB "
            f"{costs.first:5.0f} s at first   {count} x {cell.protocol.epochs} epochs",
            flush=True,
        )
    print(f"one seed of all, one after another: {hours:.2f} hours")


if __name__ == "__main__":
    main()
