"""Other processes of a run: count them, notice that one has ended, and say how to resume."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

INTERVAL, GRACE = 0.5, 5.0  # seconds between two checks; seconds from the end of a process until this one ends itself


def peer_has_ended(command: str) -> str:
    """Return the error message of a process after another one has ended; `command` continues the run."""
    hint = f"`{command}` under torchrun continues from the newest checkpoint"
    return f"another process of this run has ended, so training stops; {hint}"


def is_peer_error(error: RuntimeError) -> bool:
    """Return whether an exchange between processes failed, such as because another process has ended."""
    broken = ("closed by peer", "reset by peer", "Broken pipe")  # gloo's errors have no class of their own
    return isinstance(error, dist.DistError) or any(words in str(error) for words in broken)


def launched_processes() -> int:
    """Return the number of processes that torchrun, or another launcher, has started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def peer_errors(replacement: BaseException) -> Iterator[None]:
    """Raise `replacement` if an exchange inside the block fails because another process has ended."""
    try:
        yield
    except RuntimeError as error:
        if not is_peer_error(error):
            raise
        raise replacement from error


@contextmanager
def watched_peers(command: str) -> Iterator[None]:
    """End this process with status 1 and one sentence if another process of the run on this host ends inside the block.

    A process that waits for another one inside NCCL gets no error and runs no signal handler. So a thread checks
    whether the processes exist. After one has ended, it waits for `GRACE` seconds, in which other backends raise an
    error that says more, and this process can finish writing a checkpoint. Processes leave the block together.

    Args:
        command: command that continues the run, for the message.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    everyone: list[tuple[str, int]] = [("", 0)] * dist.get_world_size()
    dist.all_gather_object(everyone, (_host(), os.getpid()))
    peers = [process for host, process in everyone if host == _host() and process != os.getpid()]
    left = threading.Event()
    thread = threading.Thread(target=_watch, args=(peers, left, peer_has_ended(command)), daemon=True)
    thread.start()
    try:
        yield
        dist.barrier()  # otherwise a process that leaves first seems to have ended too early
    finally:
        left.set()


def _watch(peers: list[int], left: threading.Event, sentence: str) -> None:
    while not left.wait(INTERVAL):
        if not all(map(_exists, peers)):
            if not left.wait(GRACE):
                os.write(2, f"error: {sentence}\n".encode())
                os._exit(1)
            return


def _exists(process: int) -> bool:
    """Return whether a process exists and is no zombie."""
    status = Path(f"/proc/{process}/stat")
    try:
        if Path("/proc/self/stat").exists():
            return status.read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
        os.kill(process, 0)
    except OSError:
        return False
    return True


def _host() -> str:
    """Return the name of this host and, on Linux, of the namespace in which ids of processes are unique."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}"
