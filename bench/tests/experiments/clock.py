"""Clock with which a sweep reaches its deadline as soon as it has written enough rows, on a machine of any speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kalmix_bench.runner import limited, scheduler, workers

DEADLINE = 1000.0  # seconds
_SAVING = 250.0  # seconds before it at which cells stop


class Clock:
    """Replacement for the module `time`. Its clock jumps to the time at which cells store a checkpoint and stop.

    Args:
        results: file of rows.
        rows: number of rows after which it jumps. Forked processes see the same time.
    """

    sleep: Callable[[float], None] = staticmethod(time.sleep)

    def __init__(self, results: Path, rows: int) -> None:
        self._results, self._rows, self._has_jumped = results, rows, False

    def monotonic(self) -> float:
        if not self._has_jumped and self._results.exists():
            self._has_jumped = self._results.read_text().count("\n") >= self._rows
        return time.monotonic() + (DEADLINE - _SAVING if self._has_jumped else 0.0)


def set_clock(patch: pytest.MonkeyPatch, results: Path, rows: int) -> Clock:
    """Make sweeps with a deadline of `DEADLINE` seconds reach it after `rows` rows; return their clock."""
    clock = Clock(results, rows)
    for module in (limited, scheduler, workers):
        patch.setattr(module, "time", clock)
    patch.setattr(limited, "SAVING", _SAVING)
    return clock
