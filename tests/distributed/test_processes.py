"""Processes of a test: a crash is tried again once, and an exception is not."""

import os
import signal
import time
from pathlib import Path

import pytest
from torch import multiprocessing

from distributed import processes
from distributed.processes import run_ranks

pytestmark = pytest.mark.slow  # each test takes 3 to 7 seconds


def crash(rank: int, world: int, folder: str, times: int) -> None:
    """Crash in rank 0, as often as `times` says; every attempt finds the files of the first."""
    attempts = Path(f"{folder}-attempts")
    assert sorted(path.name for path in Path(folder).iterdir()) == ["input"]
    if rank == 0:
        attempts.write_text(attempts.read_text() + "x" if attempts.exists() else "x")
        (Path(folder) / "output").touch()
        if len(attempts.read_text()) <= times:
            os.kill(os.getpid(), signal.SIGSEGV)


def fail(rank: int, world: int, folder: str) -> None:
    raise ValueError("wrong")


def wait(rank: int, world: int, folder: str) -> None:
    time.sleep(100)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "input").touch()
    return tmp_path / "run"


def test_a_crash_is_tried_again(folder: Path):
    with pytest.warns(UserWarning, match="SIGSEGV; trying once more"):
        run_ranks(crash, 1, folder, 1)
    assert (folder.parent / "run-attempts").read_text() == "xx"
    assert sorted(path.name for path in folder.iterdir()) == ["input", "output"]


def test_a_second_crash_fails(folder: Path):
    with (
        pytest.warns(UserWarning, match="trying once more"),
        pytest.raises(multiprocessing.ProcessExitedException, match="SIGSEGV"),
    ):
        run_ranks(crash, 1, folder, 2)


def test_an_exception_fails_at_once(folder: Path, recwarn: pytest.WarningsRecorder):
    with pytest.raises(multiprocessing.ProcessRaisedException, match="wrong"):
        run_ranks(fail, 1, folder)
    assert not recwarn.list


def test_a_rank_that_waits_for_ever_ends(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "LIMIT", 1)
    begin = time.monotonic()
    with pytest.raises(multiprocessing.ProcessExitedException, match="exit code 1"):
        run_ranks(wait, 1, folder)
    assert time.monotonic() - begin < 60
