"""Worker processes of a sweep. Each runs one batch of cells after the other until all are finished or time is up."""

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

from kalmix_bench.runner.experiment import ProgressFn

POLL_SECONDS = 0.5  # seconds between polls of cells that another sweep is running
SHUTDOWN_SECONDS = 2.0  # seconds that processes have to exit by themselves
START_METHOD = "spawn"  # CUDA does not work after a fork
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

Batch = tuple[Any, ...]  # cells that run together, usually one
ProgressFactory = Callable[[Batch, int], ProgressFn]  # takes a batch that starts, and the number of batches
RunBatchFn = Callable[
    [Batch, Callable[[], ProgressFn]], str
]  # returns "finished", "stopped", or "taken" (by another sweep)


class CellError(ValueError):
    """Cell that cannot be run; the message has its name and the reason."""


class WorkerConfig(NamedTuple):
    """Processes and time limits of a sweep.

    Attributes:
        gpus: value of CUDA_VISIBLE_DEVICES for each process: "" for no GPU, `None` to leave the variable unchanged.
        stop: time of `time.monotonic` after which cells store a checkpoint and stop, and no cell starts.
        end: time of `time.monotonic` at which cells that have not stopped are terminated.
        failures: receives the reason of each failed batch, by its first cell. If `None`, the first failure is raised.
        one_batch: whether a process ends after one batch, so that the next begins without its memory and caches.
    """

    gpus: Sequence[str | None]
    stop: float = math.inf
    end: float = math.inf
    failures: dict[Any, str] | None = None
    one_batch: bool = False


def run_in_workers(
    batches: Sequence[Batch], run_batch: RunBatchFn, progress_factory: ProgressFactory, worker_config: WorkerConfig
) -> None:
    """Run batches in worker processes until all are finished or failed, or the time limit is reached.

    If a batch runs out of GPU memory next to others, its process ends and the batch is the next to run, from its last
    checkpoint. So fewer batches share the GPU from then on. A batch that runs out of memory alone fails.

    Args:
        batches: batches to run, in this order.
        run_batch: picklable function that runs a batch.
        progress_factory: called as a batch starts; the function that it returns receives the batch's progress.
        worker_config: processes and time limits.

    Raises:
        CellError: a cell cannot be run.
        RuntimeError: a cell failed, or its process died.
        OSError: the disk is full; names the path.
    """
    _WorkerPool(batches, run_batch, progress_factory, worker_config).run()


class _Worker(NamedTuple):
    process: Any
    gpu: str | None


class _BatchInProgress:
    """Batch assigned to a worker; `has_reported` is set by its first report, which comes after a training step."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.start_time, self.has_reported = batch, math.inf, False
        self.on_progress: ProgressFn | None = None


class _WorkerPool:
    """Pool of workers. Each receives batches through a pipe and sends messages when one starts, progresses and ends."""

    def __init__(
        self,
        batches: Sequence[Batch],
        run_batch: RunBatchFn,
        progress_factory: ProgressFactory,
        worker_config: WorkerConfig,
    ) -> None:
        self.count, self.run_batch, self.progress_factory, self.worker_config = (
            len(batches),
            run_batch,
            progress_factory,
            worker_config,
        )
        self.queue: deque[Batch] = deque(batches)
        self.idle: deque[Connection] = deque()
        self.workers: dict[Connection, _Worker] = {}
        self.running: dict[Connection, _BatchInProgress] = {}
        self.retry_time = 0.0  # batches of another sweep are not tried again before this time
        self.max_first_report = 0.0  # largest time from the start of a batch to its first report, in seconds

    def run(self) -> None:
        try:
            for gpu in self.worker_config.gpus:
                self._start(gpu)
            while (self.queue or self.running) and time.monotonic() < self.worker_config.end:
                self._assign_batches()
                for link in wait(list(self.running), POLL_SECONDS) if self.running else ():
                    assert isinstance(link, Connection)
                    self._receive(link)
                if not self.running and self.queue:
                    time.sleep(max(0.0, self.retry_time - time.monotonic()))
            self._shut_down()
        finally:
            for worker in self.workers.values():
                worker.process.terminate()
            for worker in self.workers.values():
                worker.process.join()

    def _start(self, gpu: str | None) -> None:
        context = multiprocessing.get_context(START_METHOD)
        parent_end, child_end = context.Pipe()
        threads = max(1, torch.get_num_threads() // len(self.worker_config.gpus))
        process = context.Process(target=_serve, args=(child_end, self.run_batch, threads), daemon=True)
        with _visible_devices(gpu):
            process.start()
        child_end.close()
        self.workers[parent_end] = _Worker(process, gpu)
        self.idle.append(parent_end)

    def _shut_down(self) -> None:
        """Let idle processes exit by themselves: terminating one disturbs others that share its GPU through MPS."""
        for link in self.idle:
            link.close()
        until = time.monotonic() + SHUTDOWN_SECONDS
        for link in self.idle:
            self.workers[link].process.join(max(0.0, until - time.monotonic()))

    def _assign_batches(self) -> None:
        """Give a batch to each idle worker, unless it could not report, and therefore stop, before the time limit."""
        if time.monotonic() + self.max_first_report >= self.worker_config.stop:
            self.queue.clear()
        while self.queue and self.idle and time.monotonic() >= self.retry_time:
            link, batch = self.idle.popleft(), self.queue.popleft()
            link.send(batch)
            self.running[link] = _BatchInProgress(batch)

    def _receive(self, link: Connection) -> None:
        running = self.running[link]
        batch = running.batch
        try:
            message, *payload = link.recv()
        except EOFError:
            self.workers[link].process.join()
            died = f"its process died ({self.workers[link].process.exitcode})"
            self._replace(link, RuntimeError(f"{batch[0]}: {died}"), died)
            return
        if message == "started":
            running.start_time, running.on_progress = time.monotonic(), self.progress_factory(batch, self.count)
        elif message == "progress" and running.on_progress is not None:
            if not running.has_reported:
                running.has_reported, self.max_first_report = (
                    True,
                    max(self.max_first_report, time.monotonic() - running.start_time),
                )
            running.on_progress(*payload)
        elif message == "disk":
            raise OSError(*payload)
        elif message == "invalid":
            self._fail(batch, CellError(f"{batch[0]}: {payload[0]}"), payload[0])
            self._release(link)
        elif message == "memory" and self._shares_gpu(link):
            running = self.running.pop(link)
            if running.on_progress is not None:
                running.on_progress(0.0, "out of memory, waits until another cell ends")
            self.queue.appendleft(batch)
            self.workers.pop(link).process.join(SHUTDOWN_SECONDS)  # its memory is free after that
            link.close()
        elif message in ("failed", "memory"):
            self._replace(link, RuntimeError(f"{batch[0]}:\n{payload[0]}"), payload[0])
        elif message in ("finished", "stopped", "taken"):
            self._release(link)
            if message == "taken":
                self.queue.append(batch)
                self.retry_time = time.monotonic() + (POLL_SECONDS if len(self.queue) <= len(self.idle) else 0.0)

    def _shares_gpu(self, link: Connection) -> bool:
        """Return whether other batches run on the GPU of this worker."""
        gpu = self.workers[link].gpu
        return any(self.workers[other].gpu == gpu for other in self.running if other is not link)

    def _release(self, link: Connection) -> None:
        del self.running[link]
        if self.worker_config.one_batch:
            process = self.workers[link].process
            self._start_again(link)
            process.join(SHUTDOWN_SECONDS)
            process.terminate()
        else:
            self.idle.append(link)

    def _replace(self, link: Connection, error: Exception, reason: str) -> None:
        """Start a process in place of one that failed."""
        self._fail(self.running.pop(link).batch, error, reason)
        self._start_again(link)

    def _start_again(self, link: Connection) -> None:
        link.close()
        gpu = self.workers.pop(link).gpu
        if self.queue:
            self._start(gpu)

    def _fail(self, batch: Batch, error: Exception, reason: str) -> None:
        if self.worker_config.failures is None:
            raise error
        self.worker_config.failures[batch[0]] = reason


@contextmanager
def _visible_devices(gpu: str | None) -> Iterator[None]:
    """Limit a process that starts in this context to this GPU."""
    before = os.environ.get(VISIBLE_DEVICES)
    if gpu is not None:
        os.environ[VISIBLE_DEVICES] = gpu
    try:
        yield
    finally:
        if before is not None:
            os.environ[VISIBLE_DEVICES] = before
        elif gpu is not None:
            del os.environ[VISIBLE_DEVICES]


def _serve(link: Connection, run_batch: RunBatchFn, threads: int) -> None:
    """Run batches from the pipe until one fails or the other end closes. Ctrl-C is handled by the other end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)

    def begin() -> ProgressFn:
        link.send(("started",))
        return lambda done, has_reported: link.send(("progress", done, has_reported))

    while True:
        try:
            batch = link.recv()
        except EOFError:
            return
        try:
            link.send((run_batch(batch, begin),))
        except (BrokenPipeError, ConnectionResetError):  # the other end has exited
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
            link.send(("invalid", str(error)))
        except torch.OutOfMemoryError:
            link.send(("memory", traceback.format_exc()))
            return
        except Exception:
            link.send(("failed", traceback.format_exc()))
            return
