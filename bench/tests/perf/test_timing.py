"""Kernels of a GPU step: what is counted, with a profiler and a GPU of the test's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import DeviceType

from kalmix_bench.perf import timing
from kalmix_bench.perf.models import build, measure
from kalmix_bench.perf.models.protocol import ModelSize


def event(name: str, microseconds: float, *, device: DeviceType = DeviceType.CUDA, annotation: bool = False) -> Any:
    time_range = SimpleNamespace(elapsed_us=lambda: microseconds)
    return SimpleNamespace(name=name, device_type=device, is_user_annotation=annotation, time_range=time_range)


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record these events instead of a GPU's."""
    events = [
        event("gemm", 1000.0),
        event("silu", 500.0),
        event("Memcpy HtoD", 100.0),
        event("Memset (Device)", 25.0),
        event("Optimizer.step#AdamW.step", 9e6, annotation=True),
        event("aten::mm", 9e6, device=DeviceType.CPU),
        event("cudaLaunchKernel", 9e6, device=DeviceType.CPU),
        event("cudaGraphLaunch", 9e6, device=DeviceType.CPU),
    ]

    def profile(**options: Any) -> Any:
        return SimpleNamespace(start=lambda: None, stop=lambda: None, events=lambda: events)

    monkeypatch.setattr(torch.profiler, "profile", profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return events


def test_kernels_are_counted_and_copies_take_time(profiler: list[Any]) -> None:
    calls: list[int] = []
    assert timing.kernels_launched(lambda: calls.append(1)) == (2, 1.625)
    assert calls == [1]


def test_launches_of_kernels_and_graphs_are_counted(profiler: list[Any]) -> None:
    recording = timing.Recording()
    recording.start()
    assert recording.stop() == timing.Launches(kernels=2, launches=2, gpu_ms=1.625)


def test_a_row_of_a_gpu_has_kernels_and_memory_with_and_without_weights(profiler, monkeypatch) -> None:
    class Mark:
        times = iter(range(0, 1000, 20))

        def __init__(self, enable_timing: bool) -> None:
            self.time = 0.0

        def record(self) -> None:
            self.time = next(self.times)

        def elapsed_time(self, later: Mark) -> float:
            return later.time - self.time

    for name, value in {"memory_allocated": 10, "max_memory_allocated": 70}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    size = ModelSize(layers=1, hidden_size=32, batch_size=2, seq_len=16, vocab_size=64, dtype="float32")
    trainer = measure.Trainer(build.build("attention", size), torch.arange(200) % 64, size, "eager")
    step = trainer.step
    trainer.device = torch.device("cuda")

    def on_the_cpu() -> None:
        trainer.device = torch.device("cpu")
        step()
        trainer.device = torch.device("cuda")

    monkeypatch.setattr(trainer, "step", on_the_cpu)
    found = measure._steps(trainer, steps=3)
    assert found["times_ms"] == [20, 20, 20] and found["tokens_per_s"] == 2 * 16 * 1e3 / 20
    assert (found["peak_memory"], found["step_memory"], found["kernels"], found["gpu_ms"]) == (70, 60, 2, 1.625)
