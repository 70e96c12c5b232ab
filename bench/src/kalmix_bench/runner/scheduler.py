"""Scheduler of sweeps: runs each missing cell once, in one or several processes, also next to other sweeps."""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from filelock import Timeout

from kalmix.files import FORMAT, disk_errors
from kalmix.training.provenance import provenance
from kalmix_bench.runner.cells import Results, Row
from kalmix_bench.runner.experiment import CellStopped, CellT, Experiment, ProgressFn
from kalmix_bench.runner.workers import POLL_SECONDS, Batch, ProgressFactory, WorkerConfig, run_in_workers


class Task(NamedTuple):
    """Arguments of `run` that every batch of cells needs."""

    experiment: Experiment[Any]
    results: Results
    device: torch.device
    stop: float = math.inf  # time of `time.monotonic` after which cells must stop

    def finished(self, cells: Iterable[Any]) -> dict[Any, Row]:
        """Return the rows of the cells that need not run again."""
        rows = self.results.rows(cells)
        return {cell: row for cell, row in rows.items() if self.experiment.is_complete(cell, self.results)}


def run(
    experiment: Experiment[CellT],
    cells: Iterable[CellT],
    results: Results,
    device: torch.device,
    *,
    jobs: int = 1,
    progress_factory: ProgressFactory = lambda batch, batches: lambda done, status: None,
    worker_config: WorkerConfig | None = None,
) -> dict[CellT, Row]:
    """Run the cells that are missing in `results`; return the rows of all cells, in their order.

    Each row is written as soon as its batch ends, so finished work is never lost or repeated. If another process runs
    a cell, this one waits for its row.

    Args:
        experiment: experiment that runs the cells.
        cells: cells to run; duplicates are run once.
        results: file of rows.
        device: device of the cells.
        jobs: number of processes; 1 is this process. Each process runs one batch after the other.
        progress_factory: called with each batch as it starts and the number of batches; returns the batch's
            `ProgressFn`.
        worker_config: processes and time limits, in place of `jobs`; cells that it leaves unfinished have no row.

    Raises:
        ArgumentError: `results` is not a file of results, or `experiment` cannot run a cell.
        CellError: the same, from a worker process.
        OSError: the disk is full; names the path.
    """
    cell_list, task = (
        list(dict.fromkeys(cells)),
        Task(experiment, results, device, math.inf if worker_config is None else worker_config.stop),
    )
    known = task.finished(cell_list)
    for cell in known:  # needed if a run was killed after it wrote the row
        experiment.clear(cell, results)
    missing = [cell for cell in cell_list if cell not in known]
    batches = [tuple(group) for _, group in groupby(missing, experiment.group_key)]
    if worker_config is None and (jobs == 1 or len(batches) < 2):
        _run_in_this_process(batches, task, progress_factory)
    elif batches:
        worker_config = worker_config or WorkerConfig([None] * jobs)
        worker_config = worker_config._replace(gpus=worker_config.gpus[: len(batches)])
        run_in_workers(batches, partial(_run_batch, task), progress_factory, worker_config)
    known = task.finished(cell_list)
    return {cell: known[cell] for cell in cell_list if cell in known}


def _run_batch(task: Task, batch: Batch, begin: Callable[[], ProgressFn]) -> str:
    """Run and write the missing cells of a batch; return "finished", "stopped", or "taken" if another process has a
    cell.
    """
    experiment, results, device, stop = task
    with ExitStack() as claims, disk_errors(results.path.parent):
        for cell in batch:
            try:
                claims.enter_context(results.claim(cell).acquire(timeout=0))
            except Timeout:
                return "taken"
        on_progress, known = begin(), task.finished(batch)  # another sweep may have finished some of them

        remaining = tuple(cell for cell in batch if cell not in known)
        status = "" if remaining else "by another sweep"

        def report(done: float, text: str) -> bool:
            nonlocal status
            status = text
            on_progress(min(done, 0.999), text)
            return time.monotonic() >= stop

        if remaining:
            began = time.monotonic()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            try:
                outcomes = experiment.run(remaining, results, device, report)
            except CellStopped:
                return "stopped"
            origin = {
                "seconds": round(time.monotonic() - began, 1),
                "format": FORMAT,
                "peak_memory": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
                **provenance(device, experiment.commit),
            }
            results.add({**cell.to_dict(), **origin, **more} for cell, more in zip(remaining, outcomes, strict=True))
        for cell in batch:
            experiment.clear(cell, results)
        on_progress(1.0, status)
    if device.type == "cuda":  # other processes may share the GPU
        gc.collect()
        torch.cuda.empty_cache()
    return "finished"


def _run_in_this_process(batches: list[Batch], task: Task, progress_factory: ProgressFactory) -> None:
    queue, skipped = deque(batches), 0
    while queue:
        batch = queue.popleft()
        if _run_batch(task, batch, lambda batch=batch: progress_factory(batch, len(batches))) == "finished":
            skipped = 0
        else:
            queue.append(batch)
            skipped += 1
        if skipped and skipped >= len(queue):
            time.sleep(POLL_SECONDS)
