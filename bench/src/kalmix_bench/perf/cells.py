"""Measure the time and memory of the cells of `kalmix bench`: per step, per epoch, and of a whole preset.

    python -m kalmix_bench.perf.cells mad --layer kla --layer gla        # of the preset `paper`, on a GPU
    python -m kalmix_bench.perf.cells mqar --task update --hidden-size 128
    python -m kalmix_bench.perf.cells a5 --preset short --layer kla --depth 3 --together 12 --profile
    python -m kalmix_bench.perf.cells mad --preset laptop --device cpu

Prints, for each cell that differs in more than learning rate, weight decay or seed: milliseconds of a training step
(forward and backward, the minimum of many), seconds per epoch, peak GPU memory, and seconds until the first two steps
of each kind were done (with compilation). Then prints the hours of one seed with all learning rates and weight decays
if every cell ran all epochs; without evaluation, AdamW, the Trainer's overhead, and early stopping.

`--together N` also prints the steps a second of N processes with the same cell. They share a GPU if NVIDIA's
multi-process service runs, and take turns otherwise. `--profile` prints the kernels of the slowest step that take
longest.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import BrokenBarrierError
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from kalmix.errors import ArgumentError
from kalmix_bench import datasets
from kalmix_bench.experiments.recall.data import Batches, draw_cell_data
from kalmix_bench.experiments.recall.models import build
from kalmix_bench.experiments.recall.presets import BENCHES, make_cells
from kalmix_bench.experiments.recall.protocol import RecallCell
from kalmix_bench.experiments.recall.trainer import train_cell
from kalmix_bench.runner.determinism import deterministic_mode

SECONDS = 0.3  # time for repeating a step
TOGETHER_SECONDS = 2.0  # the same, in several processes at once
PREPARATION = 300.0  # seconds after which processes do not wait for others
PROFILED = 10  # steps
_barrier: Any = None  # of the processes of `rate_together`
GIB = 2**30


class Cost(NamedTuple):
    """Milliseconds per step of each trained part, seconds per epoch, peak bytes, seconds of the first steps."""

    ms: list[float]
    epoch: float
    peak: int
    first: float


def cost(cell: RecallCell, device: torch.device, *, tf32: bool = False) -> Cost:
    """Train on two batches of each part, then time one step of each."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with _prepared(cell, device, tf32) as (steps, first):
        ms = [_least(step, device) for step in steps]
    counts = [-(-part.train // cell.protocol.batch_size) for part in cell.parts if part.train]
    epoch = sum(count * x for count, x in zip(counts, ms, strict=True)) / 1e3
    return Cost(ms, epoch, torch.cuda.max_memory_allocated() if device.type == "cuda" else 0, first)


class _Prepared(NamedTuple):
    """A training step of each part that has training rows, and the seconds of the first two steps of each."""

    steps: list[Callable[[], object]]
    first: float


@contextmanager
def _prepared(cell: RecallCell, device: torch.device, tf32: bool) -> Iterator[_Prepared]:
    """Yield the training steps of a cell, compiled and captured as in a run."""
    batch = cell.protocol.batch_size
    few = replace(
        cell,
        parts=tuple(replace(part, train=min(part.train, 2 * batch), test=min(part.test, 16)) for part in cell.parts),
        protocol=replace(cell.protocol, epochs=1, shuffle=False),
    )
    data = draw_cell_data(few)
    length = data.parts[0].test.inputs.shape[1]
    with deterministic_mode(device, tf32=tf32):
        torch.manual_seed(0)
        model = build(data.vocab_size, cell.shape, cell.layer, length, from_last=datasets.get_task(cell.task).from_last)
        model = model.to(device)
        began = time.perf_counter()
        trainer = train_cell(few, data, model, device, lambda *_: None).trainer
        first = time.perf_counter() - began
        assert trainer is not None
        batches = Batches(data, batch, shuffle=False, seed=0, device=device)  # of all parts: they share their sizes
        first_ones = _first_of_parts(few)
        inputs = [rows for number, rows in enumerate(batches) if number in first_ones]
        yield _Prepared([partial(trainer.training_step, model, rows) for rows in inputs], first)


def _first_of_parts(cell: RecallCell) -> set[int]:
    """Return the number of the first batch of each part that has training rows, if batches are not shuffled."""
    counts = [-(-part.train // cell.protocol.batch_size) for part in cell.parts if part.train]
    return {sum(counts[:part]) for part in range(len(counts))}


def rate_together(cell: RecallCell, device: torch.device, processes: int, *, tf32: bool = False) -> float:
    """Return the steps a second that several processes take together, of the first part that has training rows.

    The error of a process is raised; the others stop then.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _set_barrier, (context.Barrier(processes),)) as pool:
        rates = [pool.submit(_rate, cell, device, tf32) for _ in range(processes)]
        errors = [error for rate in rates if (error := rate.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):  # those that stopped last
        raise error
    return sum(rate.result() for rate in rates)


def _set_barrier(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _rate(cell: RecallCell, device: torch.device, tf32: bool) -> float:
    """Return this process's steps a second, while all others take steps, too."""
    try:
        with _prepared(cell, device, tf32) as ((step, *_), _first):
            _barrier.wait(PREPARATION)
            began, count = time.perf_counter(), 0
            while time.perf_counter() < began + TOGETHER_SECONDS:
                step()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                count += 1
            rate = count / (time.perf_counter() - began)
            _barrier.wait(PREPARATION)  # a process that ends would leave the device to the others
    except Exception:
        _barrier.abort()
        raise
    return rate


def kernel_table(cell: RecallCell, device: torch.device, *, tf32: bool = False) -> str:
    """Return a table of the kernels of ten steps of the part whose step takes longest, the longest kernel first.

    On a CPU it has operations.
    """
    on_gpu = device.type == "cuda"
    with _prepared(cell, device, tf32) as (steps, _first):
        step = max(steps, key=lambda step: _least(step, device))
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
            for _ in range(PROFILED):
                step()
            if on_gpu:
                torch.cuda.synchronize()
    by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    return profiled.key_averages().table(sort_by=by, row_limit=20, max_name_column_width=70)


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
    parser.add_argument("--depth", action="append", type=int, default=[])
    parser.add_argument("--together", type=int, metavar="N", help="also time N processes at once")
    parser.add_argument("--tf32", action="store_true", help="round operands of matrix products to TF32 on a GPU")
    parser.add_argument("--profile", action="store_true", help="also print the kernels that take longest")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.together is not None and arguments.together < 1:
        parser.error("--together is not positive")
    studies = BENCHES[arguments.bench][arguments.preset]
    cells = make_cells(studies, arguments.task, arguments.layer, 1, arguments.hidden_size, arguments.depth)
    counts = Counter(map(representative, cells))
    hours = 0.0
    for cell, count in counts.items():
        parts = " ".join(f"{name}={value}" for name, value in cell.parts[0].settings)
        title = f"{cell.task} {parts}  {cell.layer}  {cell.shape.hidden_size} x {cell.shape.depth}"
        try:
            costs = cost(cell, device, tf32=arguments.tf32)
            together = arguments.together and rate_together(cell, device, arguments.together, tf32=arguments.tf32)
            kernels = kernel_table(cell, device, tf32=arguments.tf32) if arguments.profile else ""
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
        if together is not None:
            print(f"{title:70s} {together:,.0f} steps a second of {arguments.together} processes together", flush=True)
        if kernels:
            print(kernels, flush=True)
    print(f"one seed of all, one after another: {hours:.2f} hours")


if __name__ == "__main__":
    main()
