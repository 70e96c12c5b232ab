"""Lock of a machine: several processes prepare at the same time; one that is timed, or needs all memory, runs alone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

Result = TypeVar("Result")


@contextmanager
def hold(*, alone: bool) -> Iterator[None]:
    """Hold the lock alone, or together with other processes that do not ask to be alone.

    A process that asks to be alone waits only for those that hold the lock already: the others wait until no process
    asks to be alone. The lock is freed if the process dies.
    """
    import fcntl  # not on Windows

    lock = Path(tempfile.gettempdir(), f"kalmix-perf-{os.getuid()}.lock")
    # Processes that ask to be alone share `queue` from then on; others need it for themselves as they begin.
    with lock.open("a") as file, lock.with_suffix(".queue").open("a") as queue:
        fcntl.flock(queue, fcntl.LOCK_SH if alone else fcntl.LOCK_EX)
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.flock(queue, fcntl.LOCK_UN)
        yield


def call_or_repeat_alone(call: Callable[[], Result], free: Callable[[], object], *, alone: bool = False) -> Result:
    """Return the result of a call that prepares; call again alone if other processes left too little GPU memory.

    Args:
        call: compiles, for example; it is not timed.
        free: returns memory that no tensor uses to the GPU.
        alone: whether to hold the machine alone from the beginning.
    """
    with hold(alone=alone):
        try:
            return call()
        except torch.OutOfMemoryError:
            if alone:
                raise
    free()
    with hold(alone=True):
        return call()
