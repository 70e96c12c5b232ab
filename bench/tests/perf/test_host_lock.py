"""The lock that gives a timed process the machine alone."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kalmix_bench.perf.host_lock import call_or_repeat_alone, hold


class Holder:
    """Thread that holds the lock until `end` is set."""

    def __init__(self, *, alone: bool) -> None:
        self.held, self.end = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, args=(alone,), daemon=True)
        self.thread.start()

    def _run(self, alone: bool) -> None:
        with hold(alone=alone):
            self.held.set()
            self.end.wait(30)

    def finish(self) -> None:
        self.end.set()
        self.thread.join(30)


@pytest.fixture
def holder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Holder]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Holder


def test_processes_that_prepare_hold_the_lock_together(holder: Callable[..., Holder]) -> None:
    one, other = holder(alone=False), holder(alone=False)
    assert one.held.wait(10) and other.held.wait(10)
    timed = holder(alone=True)
    assert not timed.held.wait(0.1)
    one.finish()
    assert not timed.held.wait(0.1)
    other.finish()
    assert timed.held.wait(10)
    timed.finish()


def test_a_process_that_is_timed_does_not_wait_for_later_ones_that_prepare(holder: Callable[..., Holder]) -> None:
    first = holder(alone=False)
    assert first.held.wait(10)
    timed = [holder(alone=True), holder(alone=True)]
    assert not timed[0].held.wait(0.2)
    later = holder(alone=False)
    assert not later.held.wait(0.2)
    first.finish()
    for _ in range(2):
        (now,) = [x for x in timed if x.held.wait(0.5)]
        assert not later.held.is_set()
        now.finish()
        timed.remove(now)
    assert later.held.wait(10)
    later.finish()


def test_a_first_call_without_memory_is_repeated_alone(holder: Callable[..., Holder]) -> None:
    other, events = holder(alone=False), []
    assert other.held.wait(10)

    def call() -> str:
        events.append("call")
        if len(events) == 1:
            threading.Timer(0.1, other.end.set).start()  # the other process ends
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")
        assert other.end.is_set()
        return "result"

    assert call_or_repeat_alone(call, lambda: events.append("free")) == "result"
    assert events == ["call", "free", "call"]
    with pytest.raises(torch.OutOfMemoryError):
        call_or_repeat_alone(_without_memory, lambda: None)


def _without_memory() -> None:
    raise torch.OutOfMemoryError("tried to allocate 9 GiB")
