"""Lock by which processes that prepare share a machine, and one that is timed has it alone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
