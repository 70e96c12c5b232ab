"""Running the cells of an experiment that are missing: each once, several at a time, whoever else runs the same."""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import groupby
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
from filelock import Timeout

from kalmix.files import FORMAT, writing
from kalmix.training.provenance import provenance
from kalmix_bench.runner.cells import Results, Row
from kalmix_bench.runner.experiment import CellT, Experiment, Tell

PAUSE = 0.5  # seconds between two looks at cells that another sweep is running

Piece = tuple[Any, ...]  # cells that are run together, mostly one
Follow = Callable[[Piece, int], Tell]  # called as a piece begins, with how many there are in this sweep


class Task(NamedTuple):
    """Arguments of `run` that every piece needs."""

    experiment: Experiment[Any]
    results: Results
    device: torch.device

    def finished(self, cells: Iterable[Any]) -> dict[Any, Row]:
        """Return the rows of those cells that need not be run again."""
        rows = self.results.rows(cells)
        return {cell: row for cell, row in rows.items() if self.experiment.is_complete(cell, self.results)}


class CellError(ValueError):
    """A cell cannot be run; says which, and why."""


def run(
    experiment: Experiment[CellT],
    cells: Iterable[CellT],
    results: Results,
    device: torch.device,
    *,
    jobs: int = 1,
    follow: Follow = lambda piece, pieces: lambda done, told: None,
) -> dict[CellT, Row]:
    """Run the cells that `results` lacks, and return the rows of all that were asked, in their order.

    Each row is written as soon as its piece is done, so nothing that is finished is lost or done again. Cells that
    another process is running are waited for.

    Args:
        experiment: that the cells belong to; it runs them.
        cells: duplicates are run once.
        results: where rows are stored.
        device: that cells run on.
        jobs: processes. One is this process; several are new ones, each of which takes a piece after the other.
        follow: told of every piece as it begins, and how it goes on.

    Raises:
        ArgumentError: `results` is no such file, or what `experiment` raises of a cell that it cannot run.
        CellError: the same, from a process of its own.
        OSError: the disk is full; names the path.
    """
    asked, task = list(dict.fromkeys(cells)), Task(experiment, results, device)
    known = task.finished(asked)
    for cell in known:  # a run may have been killed between writing the row and this
        experiment.clear(cell, results)
    missing = [cell for cell in asked if cell not in known]
    pieces = [tuple(group) for _, group in groupby(missing, experiment.together)]
    if jobs == 1 or len(pieces) < 2:
        _here(pieces, task, follow)
    else:
        _apart(pieces, task, follow, min(jobs, len(pieces)))
    known = task.finished(asked)
    return {cell: known[cell] for cell in asked}


def _finish(piece: Piece, task: Task, begin: Callable[[], Tell]) -> bool:
    """Run what is missing of a piece and write it; false if another process has one of its cells in hand."""
    experiment, results, device = task
    with ExitStack() as claims, writing(results.path.parent):
        for cell in piece:
            try:
                claims.enter_context(results.claim(cell).acquire(timeout=0))
            except Timeout:
                return False
        tell, known = begin(), task.finished(piece)  # another sweep may have finished some of it meanwhile

        left = tuple(cell for cell in piece if cell not in known)
        how = "" if left else "by another sweep"

        def under_way(done: float, told: str) -> None:
            nonlocal how
            how = told
            tell(min(done, 0.999), told)

        if left:
            began = time.monotonic()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            found = experiment.run(left, results, device, under_way)
            where = {
                "seconds": round(time.monotonic() - began, 1),
                "format": FORMAT,
                "peak_memory": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
                **provenance(device),
            }
            results.add({**cell.written(), **where, **more} for cell, more in zip(left, found, strict=True))
        for cell in piece:
            experiment.clear(cell, results)
        tell(1.0, how)
    return True


def _here(pieces: list[Piece], task: Task, follow: Follow) -> None:
    waiting, refused = deque(pieces), 0
    while waiting:
        piece = waiting.popleft()
        if _finish(piece, task, lambda piece=piece: follow(piece, len(pieces))):
            refused = 0
        else:
            waiting.append(piece)
            refused += 1
        if refused and refused >= len(waiting):
            time.sleep(PAUSE)


def _apart(pieces: list[Piece], task: Task, follow: Follow, jobs: int) -> None:
    """A process a job, each with a pipe: pieces go in; that one began, how it stands, and its end come out."""
    context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // jobs)
    workers: dict[Connection, Any] = {}
    try:
        for _ in range(jobs):
            here, there = context.Pipe()
            worker = context.Process(target=_serve, args=(there, task, threads), daemon=True)
            worker.start()
            there.close()
            workers[here] = worker
        _deal(pieces, workers, follow)
    finally:
        for worker in workers.values():
            worker.terminate()
        for worker in workers.values():
            worker.join()


def _deal(pieces: list[Piece], workers: dict[Connection, Any], follow: Follow) -> None:
    """Hand out pieces until all are finished."""
    waiting, idle = deque(pieces), deque(workers)
    in_hand: dict[Connection, tuple[Piece, Tell | None]] = {}
    not_before = 0.0
    while waiting or in_hand:
        while waiting and idle and time.monotonic() >= not_before:
            link, piece = idle.popleft(), waiting.popleft()
            link.send(piece)
            in_hand[link] = piece, None
        for link in wait(list(in_hand), PAUSE) if in_hand else ():
            assert isinstance(link, Connection)
            piece, tell = in_hand[link]
            try:
                message, *said = link.recv()
            except EOFError:
                workers[link].join()
                raise RuntimeError(f"{piece[0]}: its process died ({workers[link].exitcode})") from None
            if message == "began":
                in_hand[link] = piece, follow(piece, len(pieces))
            elif message == "told" and tell is not None:
                tell(*said)
            elif message == "mistake":
                raise CellError(f"{piece[0]}: {said[0]}")
            elif message == "disk":
                raise OSError(*said)
            elif message == "failed":
                raise RuntimeError(f"{piece[0]}:\n{said[0]}")
            elif message in ("finished", "taken"):
                del in_hand[link]
                idle.append(link)
                if message == "taken":
                    waiting.append(piece)
                    not_before = time.monotonic() + (PAUSE if len(waiting) <= len(idle) else 0.0)
        if not in_hand and waiting:
            time.sleep(max(0.0, not_before - time.monotonic()))


def _serve(link: Connection, task: Task, threads: int) -> None:
    """A process of `_apart`: finish what comes, until the other end closes. Ctrl-C is for the other end to act on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)

    def begin() -> Tell:
        link.send(("began",))
        return lambda done, told: link.send(("told", done, told))

    while True:
        try:
            piece = link.recv()
        except EOFError:
            return
        try:
            link.send(("finished" if _finish(piece, task, begin) else "taken",))
        except (BrokenPipeError, ConnectionResetError):  # nobody is left to tell
            return
        except OSError as error:
            known = error.filename is not None
            disk = ("disk", error.errno, error.strerror, str(error.filename))
            link.send(disk if known else ("failed", traceback.format_exc()))
        except ValueError as error:
            kalmix = type(error).__module__.startswith("kalmix.")
            link.send(("mistake", str(error)) if kalmix else ("failed", traceback.format_exc()))
        except Exception:
            link.send(("failed", traceback.format_exc()))
