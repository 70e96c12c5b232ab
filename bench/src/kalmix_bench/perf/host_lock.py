"""Lock by which processes that prepare share a machine, and one that is timed has it alone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def hold(*, alone: bool) -> Iterator[None]:
    """Hold the lock alone, or together with other processes that do not ask to be alone. It is freed if the process
    dies.
    """
    import fcntl  # not on Windows

    with Path(tempfile.gettempdir(), f"kalmix-perf-{os.getuid()}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
