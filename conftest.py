"""Settings and fixtures for the tests of both packages."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import garbage
import interpreter
import pytest
import torch
from full_disk import Disk

if not torch.cuda.is_available():  # Triton's interpreter stands in for a GPU; Triton reads this when it is imported
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton"):
        interpreter.patch()
torch.set_num_threads(1)  # the suite runs one process a core
os.environ.setdefault("OMP_NUM_THREADS", "1")  # and so do the processes that tests start
os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # which print where they were if they crash


def pytest_collection_finish() -> None:
    """Exempt the modules imported by then from garbage collection: some tests collect garbage many times."""
    garbage.collect_rarely()


@pytest.fixture(scope="module", autouse=True)
def _exempt_objects_from_garbage_collection() -> Iterator[None]:
    """After each module, exempt surviving objects, such as compiled graphs, from garbage collection too."""
    yield
    gc.collect()
    gc.freeze()


class CommandResult(NamedTuple):
    """Exit status and output of a command line."""

    status: int
    output: str
    errors: str


@pytest.fixture
def kalmix(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., CommandResult]:
    """Run a command line in this process."""
    from kalmix.cli import main

    def run(*arguments: object, columns: int = 200) -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["kalmix", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", str(columns))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return CommandResult(int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Set the compute capability of the GPU, whether PyTorch is built for CUDA, and whether it brings NVRTC."""
    from kalmix.ops._shared import cuda

    def set_to(capability: tuple[int, int] = cuda.HOPPER, version: str | None = "12.8", nvrtc: bool = True) -> None:
        cuda._unsupported.cache_clear()
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
        monkeypatch.setattr(torch.version, "cuda", version)
        monkeypatch.setattr(cuda, "nvrtc_library", lambda: object() if nvrtc else None)

    yield set_to
    cuda._unsupported.cache_clear()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    """Make folders in which space runs out."""
    disks: list[Disk] = []

    def make(size: int, *, mount: bool) -> Disk:
        disks.append(Disk(tmp_path / "disk", size, mount))
        return disks[-1]

    yield make
    for each in disks:
        each.close()


@pytest.fixture
def in_time() -> Iterator[None]:
    """Fail where a command takes longer than 20 seconds; one that waits for a FIFO never ends."""

    def late(number: int, frame: object) -> None:
        pytest.fail("still not done after 20 seconds")  # derives from BaseException: no command catches it

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
