"""Timing and peak memory of calls: device time of CUDA graph replays on a GPU, wall time on a CPU."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

LONG = 0.1  # seconds; longer calls are not captured as a CUDA graph
BUDGET = {"cuda": 0.5, "cpu": 2.0}  # seconds per call


class Timing(NamedTuple):
    """Milliseconds per call (GPU: median; CPU: minimum), peak bytes allocated, and seconds of the first call."""

    ms: float
    peak: int
    first: float


def measure(calls: dict[str, Callable[[], object]], device: str) -> dict[str, Timing]:
    """Time `calls` after a warm-up, for about `BUDGET` seconds each; calls that run out of memory are left out.

    On a CPU the calls alternate, so that other load and the allocator's cache affect all equally.
    """
    ready = {}
    for name, call in calls.items():
        try:
            first = _seconds(call, device)
            peak = _peak_cuda(call) if device == "cuda" else peak_cpu(call)
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
    """Return the median device time of CUDA graph replays, which excludes launch overhead.

    Plain calls are timed if a graph cannot be captured or the call is long.
    """
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


def peak_cpu(call: Callable[[], object]) -> int:
    """Return the increase of Linux's peak resident memory during a call; the C library first returns free memory."""
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


class Launches(NamedTuple):
    """Work that a call gives to a GPU.

    Attributes:
        kernels: kernels that ran, without copies and fills of memory.
        launches: calls of the host that start kernels, or a CUDA graph of many.
        gpu_ms: sum of the times of all kernels, copies and fills.
    """

    kernels: int
    launches: int
    gpu_ms: float


class Recording:
    """Profile of the GPU between `start` and `stop`."""

    def __init__(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self.profile = profile(activities=[ProfilerActivity.CUDA])

    def start(self) -> None:
        """Begin the profile, after all earlier work."""
        torch.cuda.synchronize()
        self.profile.start()

    def stop(self) -> Launches:
        """End the profile, after all work since its start, and return what ran."""
        from torch.profiler import DeviceType

        torch.cuda.synchronize()
        self.profile.stop()
        events = list(self.profile.events() or ())
        launches = sum("Launch" in event.name for event in events if event.device_type == DeviceType.CPU)
        work = [x for x in events if x.device_type == DeviceType.CUDA and not getattr(x, "is_user_annotation", False)]
        kernels = sum(not event.name.startswith(("Memcpy", "Memset")) for event in work)
        return Launches(kernels, launches, sum(event.time_range.elapsed_us() for event in work) / 1e3)


def kernels_launched(call: Callable[[], object]) -> tuple[int, float]:
    """Return the number of kernels that a call launches on a GPU, and the sum of their times in milliseconds.

    Copies and fills of memory count towards the time only.
    """
    recording = Recording()
    recording.start()
    call()
    found = recording.stop()
    return found.kernels, found.gpu_ms


def _kilobytes(status: Path, field: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])
