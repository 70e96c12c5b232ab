"""Start the ranks of a test, each in a process of its own."""

from __future__ import annotations

import faulthandler
import gc
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import garbage
from torch import distributed, multiprocessing

LIMIT = 300  # seconds until a rank that waits for ever prints where it is, and ends

# Ranks are forked from one process that has imported these modules, since importing them takes longer than most tests.
multiprocessing.set_forkserver_preload(
    ["garbage", "accelerate", "kalmix.models", "kalmix.training.run", "torch.distributed.fsdp"]
)


def run_ranks(function: Callable[..., None], world: int, folder: Path, *arguments: Any) -> None:
    """Call `function(rank, world, folder, *arguments)` in `world` processes, and wait for them.

    If a process crashes, warn and try once more from the same files. PyTorch 2.13 crashed in two runs of CI. In the
    second, which has a trace, it was in a thread that runs no Python, as rank 0 began to gather tensors with gloo.
    kalmix has no native code on CPUs. Each process prints the native stacks of its threads if it crashes (see
    `ranks.start`). Exceptions fail at once.
    """
    copy = folder.with_name(f"{folder.name}-before")
    shutil.copytree(folder, copy)
    try:
        start_ranks(function, world, folder, *arguments)
    except multiprocessing.ProcessExitedException as error:
        if error.signal_name != "SIGSEGV":
            raise
        warnings.warn(f"{function.__name__}: {error}; trying once more", stacklevel=2)
        shutil.rmtree(folder)
        shutil.copytree(copy, folder)
        start_ranks(function, world, folder, *arguments)
    finally:
        shutil.rmtree(copy)


def start_ranks(function: Callable[..., None], world: int, folder: Path, *arguments: Any) -> None:
    # The last rank that leaves removes the store, but not always. An old one has the addresses of ended processes.
    (folder / "store").unlink(missing_ok=True)
    given = LIMIT, function, world, str(folder), *arguments
    multiprocessing.start_processes(_run, given, world, start_method="forkserver")


def _run(rank: int, limit: float, function: Callable[..., None], *arguments: Any) -> None:
    faulthandler.dump_traceback_later(limit, exit=True)
    garbage.collect_rarely()
    function(rank, *arguments)
    faulthandler.cancel_dump_traceback_later()


def leave_group() -> None:
    """Free the modules that communicate, and then the process group.

    PyTorch 2.13 may wait for ever otherwise. If a module of `DistributedDataParallel` is the last owner of a group of
    gloo, garbage collection frees the group: it holds the GIL and waits for a thread of the group, and that thread
    waits for the GIL.
    """
    gc.collect()
    distributed.destroy_process_group()
