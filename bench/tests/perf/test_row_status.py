"""Tests of rows that are given up."""

import signal
import time
from contextlib import suppress

import pytest
import torch

from kalmix_bench.perf import row_status
from kalmix_bench.perf.row_status import row_or_reason


def test_a_row_given_up_in_the_middle_of_no_grad_leaves_gradients_on():
    def measure():
        torch.set_grad_enabled(False)  # as `torch.no_grad` does before its body
        time.sleep(5)

    assert row_or_reason(measure, limit=0.05)["status"] == "too slow"
    assert torch.is_grad_enabled()


def test_a_row_that_hides_its_time_limit_is_too_slow():
    def ignore():
        with suppress(Exception):  # as `__del__` does
            time.sleep(5)
        return {"status": "ok"}

    def fail():
        try:
            time.sleep(5)
        finally:
            raise RuntimeError("trying to pop from empty mode stack")  # as torch does after an interrupted entry

    for measure in (ignore, fail):
        found = row_or_reason(measure, limit=0.05)
        assert found == {"status": "too slow", "reason": "TimeLimitError: took longer than 0.05 s"}


def test_a_row_that_hides_its_time_limit_is_stopped_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(row_status, "REPEAT", 0.05)

    def measure():
        with suppress(Exception):
            time.sleep(5)
        time.sleep(5)

    begin = time.monotonic()
    assert row_or_reason(measure, limit=0.05)["status"] == "too slow"
    assert time.monotonic() - begin < 4
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
