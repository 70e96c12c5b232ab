"""Worker processes of a sweep: each runs one piece after the other, until all are finished or time is up."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from kalmix_bench.runner.experiment import Tell

PAUSE = 0.5  # seconds between two looks at cells that another sweep is running
CLOSING = 2.0  # seconds that processes are given to end by themselves
START = "spawn"  # how processes start; CUDA does not survive a fork
VISIBLE = "CUDA_VISIBLE_DEVICES"

Piece = tuple[Any, ...]  # cells that are run together, mostly one
Follow = Callable[[Piece, int], Tell]  # called as a piece begins, with how many there are in this sweep
Finish = Callable[[Piece, Callable[[], Tell]], str]  # runs a piece: "finished", "stopped", or "taken" by another sweep


class CellError(ValueError):
    """A cell cannot be run; says which, and why."""


class Campaign(NamedTuple):
    """The processes of a sweep, and when it ends.

    Attributes:
        gpus: value of CUDA_VISIBLE_DEVICES for each process, "" for none; None leaves that variable as it is.
        stop: time of `time.monotonic` from which on cells store a checkpoint and stop, and none begins.
        end: time of `time.monotonic` at which cells that have not stopped are terminated.
        failures: receives the reason of each piece that fails, by its first cell. If None, the first failure is raised.
    """

    gpus: Sequence[str | None]
    stop: float = math.inf
    end: float = math.inf
    failures: dict[Any, str] | None = None


def share(pieces: Sequence[Piece], finish: Finish, follow: Follow, campaign: Campaign) -> None:
    """Run pieces in processes of their own, until all are finished or failed, or the campaign ends.

    Args:
        pieces: to run, in this order.
        finish: runs a piece; it must be picklable.
        follow: called as a piece begins; what it returns is told how the piece goes on.
        campaign: where pieces run, and until when.

    Raises:
        CellError: a cell cannot be run.
        RuntimeError: a cell failed, or its process died.
        OSError: the disk is full; names the path.
    """
    _Sharing(pieces, finish, follow, campaign).run()


class _Worker(NamedTuple):
    process: Any
    gpu: str | None


class _Running:
    """A piece in the hands of a worker; `told` is its first report, which comes after a step of training."""

    def __init__(self, piece: Piece) -> None:
        self.piece, self.began, self.told = piece, math.inf, False
        self.tell: Tell | None = None


class _Sharing:
    """Each worker has a pipe: pieces go in; that one began, how it stands, and its end come out."""

    def __init__(self, pieces: Sequence[Piece], finish: Finish, follow: Follow, campaign: Campaign) -> None:
        self.count, self.finish, self.follow, self.campaign = len(pieces), finish, follow, campaign
        self.waiting: deque[Piece] = deque(pieces)
        self.idle: deque[Connection] = deque()
        self.workers: dict[Connection, _Worker] = {}
        self.running: dict[Connection, _Running] = {}
        self.not_before = 0.0  # pieces of another sweep are not tried again before
        self.slowest = 0.0  # seconds from the beginning of a piece to its first report, the most so far

    def run(self) -> None:
        try:
            for gpu in self.campaign.gpus:
                self._start(gpu)
            while (self.waiting or self.running) and time.monotonic() < self.campaign.end:
                self._hand_out()
                for link in wait(list(self.running), PAUSE) if self.running else ():
                    assert isinstance(link, Connection)
                    self._receive(link)
                if not self.running and self.waiting:
                    time.sleep(max(0.0, self.not_before - time.monotonic()))
            self._close()
        finally:
            for worker in self.workers.values():
                worker.process.terminate()
            for worker in self.workers.values():
                worker.process.join()

    def _start(self, gpu: str | None) -> None:
        context = multiprocessing.get_context(START)
        here, there = context.Pipe()
        threads = max(1, torch.get_num_threads() // len(self.campaign.gpus))
        process = context.Process(target=_serve, args=(there, self.finish, threads), daemon=True)
        with _visible(gpu):
            process.start()
        there.close()
        self.workers[here] = _Worker(process, gpu)
        self.idle.append(here)

    def _close(self) -> None:
        """Let idle processes end by themselves: a signal to one disturbs others that share its GPU through MPS."""
        for link in self.idle:
            link.close()
        until = time.monotonic() + CLOSING
        for link in self.idle:
            self.workers[link].process.join(max(0.0, until - time.monotonic()))

    def _hand_out(self) -> None:
        """Give a piece to each idle worker; none that could not report, and so stop, in time."""
        if time.monotonic() + self.slowest >= self.campaign.stop:
            self.waiting.clear()
        while self.waiting and self.idle and time.monotonic() >= self.not_before:
            link, piece = self.idle.popleft(), self.waiting.popleft()
            link.send(piece)
            self.running[link] = _Running(piece)

    def _receive(self, link: Connection) -> None:
        running = self.running[link]
        piece = running.piece
        try:
            message, *said = link.recv()
        except EOFError:
            self.workers[link].process.join()
            died = f"its process died ({self.workers[link].process.exitcode})"
            self._replace(link, RuntimeError(f"{piece[0]}: {died}"), died)
            return
        if message == "began":
            running.began, running.tell = time.monotonic(), self.follow(piece, self.count)
        elif message == "told" and running.tell is not None:
            if not running.told:
                running.told, self.slowest = True, max(self.slowest, time.monotonic() - running.began)
            running.tell(*said)
        elif message == "disk":
            raise OSError(*said)
        elif message == "mistake":
            self._fail(piece, CellError(f"{piece[0]}: {said[0]}"), said[0])
            self._release(link)
        elif message == "failed":
            self._replace(link, RuntimeError(f"{piece[0]}:\n{said[0]}"), said[0])
        elif message in ("finished", "stopped", "taken"):
            self._release(link)
            if message == "taken":
                self.waiting.append(piece)
                self.not_before = time.monotonic() + (PAUSE if len(self.waiting) <= len(self.idle) else 0.0)

    def _release(self, link: Connection) -> None:
        del self.running[link]
        self.idle.append(link)

    def _replace(self, link: Connection, error: Exception, reason: str) -> None:
        """Start another process in place of one that ended with a failure."""
        self._fail(self.running.pop(link).piece, error, reason)
        link.close()
        gpu = self.workers.pop(link).gpu
        if self.waiting:
            self._start(gpu)

    def _fail(self, piece: Piece, error: Exception, reason: str) -> None:
        if self.campaign.failures is None:
            raise error
        self.campaign.failures[piece[0]] = reason


@contextmanager
def _visible(gpu: str | None) -> Iterator[None]:
    """Let a process that starts see this GPU only."""
    before = os.environ.get(VISIBLE)
    if gpu is not None:
        os.environ[VISIBLE] = gpu
    try:
        yield
    finally:
        if before is not None:
            os.environ[VISIBLE] = before
        elif gpu is not None:
            del os.environ[VISIBLE]


def _serve(link: Connection, finish: Finish, threads: int) -> None:
    """Run the pieces that come, until one fails or the other end closes. Ctrl-C is for the other end to act on."""
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
            link.send((finish(piece, begin),))
        except (BrokenPipeError, ConnectionResetError):  # nobody is left to tell
            return
        except OSError as error:
            known = error.filename is not None
            disk = ("disk", error.errno, error.strerror, str(error.filename))
            link.send(disk if known else ("failed", traceback.format_exc()))
            return
        except ValueError as error:
            if not type(error).__module__.startswith("kalmix."):
                link.send(("failed", traceback.format_exc()))
                return
            link.send(("mistake", str(error)))
        except Exception:
            link.send(("failed", traceback.format_exc()))
            return
