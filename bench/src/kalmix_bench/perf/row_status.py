"""Rows of a table of measurements: how a measurement that fails, or takes too long, becomes a row with a reason."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from kalmix.errors import ArgumentError, DesignError, KernelError, NonFiniteError
from kalmix_bench.runner.experiment import CellStopped

REPEAT = 5.0
"""Seconds after which a row that goes on past its limit is stopped again: code such as `__del__` ignores errors."""


class TimeLimitError(Exception):
    """Signal that a row took too long."""


def row_or_reason(measure: Callable[[], dict[str, Any]], limit: float) -> dict[str, Any]:
    """Return the result of `measure`; or, as its "status" and "reason", why there is none.

    Args:
        measure: takes the measurements of a row.
        limit: seconds after which the row is given up.
    """
    try:
        with _time_limit(limit):
            return measure()
    except CellStopped:
        raise
    except Exception as error:
        return {"status": _status(error), "reason": _reason(error)}


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeLimitError` if the body takes longer than `seconds`, also where the body hides that error.

    The signal may come inside code that ignores errors (`__del__`), or that fails in another way when it is
    interrupted (the entry of a `with`). On exit, the gradient mode is as before.
    """
    passed: list[TimeLimitError] = []
    ended = False

    def stop(number: int, frame: FrameType | None) -> None:
        if not ended:
            passed.append(TimeLimitError(f"took longer than {seconds:g} s"))
            raise passed[-1]

    gradients, before = torch.is_grad_enabled(), signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT)
        yield
    except CellStopped:
        raise
    except Exception as error:
        if not passed or error is passed[0]:
            raise
        raise passed[0] from error
    finally:
        ended = True  # a signal from here on must not keep the next lines from their work
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        torch.set_grad_enabled(gradients)  # the signal may come between the start and the body of `torch.no_grad`
    if passed:
        raise passed[0]


def _status(error: Exception) -> str:
    for kind, status in (
        (ImportError, "not installed"),
        (TimeLimitError, "too slow"),
        (torch.OutOfMemoryError, "out of memory"),
        (NonFiniteError, "failed"),
        ((ArgumentError, KernelError, DesignError), "refused"),
    ):
        if isinstance(error, kind):
            return status
    return "failed"


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
