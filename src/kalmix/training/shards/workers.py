"""Worker processes that tokenise the parts of a source.

Each worker has a pipe. It ends when the pipe is closed, so none survives the process that started it.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from kalmix.training.shards.parts import Part
from kalmix.training.shards.tokenize_part import Advance, Job, tokenize_part


def tokenize_parts(job: Job, parts: Iterable[Part], workers: int, advance: Callable[[Advance], None]) -> None:
    """Tokenise parts in this process (`workers` of 1) or in several.

    Args:
        job: settings.
        parts: the parts.
        workers: number of processes.
        advance: called with the progress of each part.

    Raises:
        Exception: the first one that a part raised; the other workers are ended.
        OSError: a worker was killed.
    """
    if workers == 1:
        for part in parts:
            tokenize_part(job, part, advance)
        return
    waiting = iter(parts)
    with _workers(job, workers) as pipes:
        for pipe in list(pipes):
            _send_next(pipe, waiting, pipes)
        while pipes:
            for pipe in wait(pipes):
                assert isinstance(pipe, Connection)
                _receive(pipe, waiting, pipes, advance)


def _receive(
    pipe: Connection, waiting: Iterator[Part], pipes: list[Connection], advance: Callable[[Advance], None]
) -> None:
    try:
        message = pipe.recv()
    except (EOFError, ConnectionResetError):
        reason = "a worker was killed, perhaps for lack of memory; repeat the command to continue, with fewer workers"
        raise OSError(reason) from None
    if isinstance(message, Exception):
        raise message
    if isinstance(message, Advance):
        advance(message)
    else:
        _send_next(pipe, waiting, pipes)


def _send_next(pipe: Connection, waiting: Iterator[Part], pipes: list[Connection]) -> None:
    """Send the next part to a worker, or end the worker if there is none."""
    part = next(waiting, None)
    pipe.send(part)
    if part is None:
        pipes.remove(pipe)


@contextmanager
def _workers(job: Job, count: int) -> Iterator[list[Connection]]:
    """Start workers, yield their pipes, and end them. Ctrl-C reaches this process alone."""
    context = get_context("spawn")
    processes, pipes = [], []
    before = signal.getsignal(signal.SIGINT)
    main = _set_signal(signal.SIG_IGN)  # inherited by new processes
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, job), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
    finally:
        if main:
            _set_signal(before)
    ended = False
    try:
        yield list(pipes)
        ended = True
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            if not ended:
                process.terminate()
            process.join()
            pipe.close()


def _set_signal(handler: Any) -> bool:
    """Set the handler of Ctrl-C; return False in a thread, where that is impossible."""
    with suppress(ValueError):
        signal.signal(signal.SIGINT, handler)
        return True
    return False


def _work(pipe: Connection, job: Job) -> None:
    """Tokenise parts from a pipe until it sends `None` or is closed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker is one thread
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent has ended
        while (part := pipe.recv()) is not None:
            try:
                tokenize_part(job, part, pipe.send)
                pipe.send(part.number)
            except (BrokenPipeError, ConnectionResetError):
                return
            except Exception as error:
                _send_error(pipe, error)


def _send_error(pipe: Connection, error: Exception) -> None:
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pipe.send(error)
    except (TypeError, AttributeError, ValueError):  # it cannot be pickled
        pipe.send(RuntimeError("".join(traceback.format_exception(error))))
