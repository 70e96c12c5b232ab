"""Clocks and memory meters: device time from CUDA graph replays, wall time on a CPU, peaks of both."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

LONG = 0.1  # seconds, of a call that is not captured
BUDGET = {"cuda": 0.5, "cpu": 2.0}  # seconds; a GPU has one job at a time, a CPU many


class Timing(NamedTuple):
    """Milliseconds a call (a GPU's median, a CPU's minimum), peak bytes added, and the first call's seconds."""

    ms: float
    peak: int
    first: float


def measure(calls: dict[str, Callable[[], object]], device: str) -> dict[str, Timing]:
    """Time `calls`, after warming them up, for about `BUDGET` seconds each; those that run out of memory are left out.

    On a CPU they take turns, so that what else the machine does, and what the allocator keeps, is shared by all.
    """
    ready = {}
    for name, call in calls.items():
        try:
            first = _seconds(call, device)
            peak = _peak_cuda(call) if device == "cuda" else _peak_cpu(call)
            ready[name] = Timing(_cuda_ms(call) if device == "cuda" else 0.0, peak, first)
        except torch.OutOfMemoryError:
            print(f"    ({name}: out of memory)")
            torch.cuda.empty_cache()
    if device == "cuda":
        return ready
    times = _cpu_ms([calls[name] for name in ready])
    return {name: timing._replace(ms=ms) for (name, timing), ms in zip(ready.items(), times, strict=True)}


def _seconds(call: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _cuda_ms(call: Callable[[], object]) -> float:
    """Median device time of graph replays, so that launches of small kernels do not count; of plain calls if a graph
    cannot be captured, or would take long to: a call that takes long has launches by the ten thousand."""
    replay = call if _seconds(call, "cuda") > LONG else _captured(call)
    times: list[float] = []
    deadline = time.perf_counter() + BUDGET["cuda"]
    while len(times) < 3 or (time.perf_counter() < deadline and len(times) < 200):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        print(f"    (no CUDA graph: {str(error).splitlines()[0][:80]})")
        torch.cuda.synchronize()
        return call
    return graph.replay


def _cpu_ms(calls: list[Callable[[], object]]) -> list[float]:
    rounds: list[list[float]] = []
    deadline = time.perf_counter() + BUDGET["cpu"] * len(calls)
    while len(rounds) < 3 or time.perf_counter() < deadline:
        rounds.append([_seconds(call, "cpu") for call in calls])
    return [min(times) * 1e3 for times in zip(*rounds, strict=True)]


def _peak_cuda(call: Callable[[], object]) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _peak_cpu(call: Callable[[], object]) -> int:
    """From the high-water mark that Linux keeps, once the C library has given back what earlier calls left over."""
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not reset.exists():
        return 0
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    reset.write_text("5")
    before = _kilobytes(status, "VmRSS")
    call()
    return max(_kilobytes(status, "VmHWM") - before, 0) * 1024


def _kilobytes(status: Path, field: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])
