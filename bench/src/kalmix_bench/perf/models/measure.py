"""Time, kernels and memory of training steps of one model."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from kalmix.errors import ArgumentError
from kalmix.models.optimizer import optimizer_groups
from kalmix_bench.perf.host_lock import call_or_repeat_alone, hold
from kalmix_bench.perf.models.build import build
from kalmix_bench.perf.models.protocol import ModelCell, ModelSize
from kalmix_bench.perf.peers import has_fla
from kalmix_bench.perf.row_status import TimeLimitError, row_or_reason
from kalmix_bench.perf.text_batches import batches, word_tokens
from kalmix_bench.perf.timing import kernels_launched, peak_cpu

WARM_UP = 3  # steps between the first and the timed ones
SLOWEST = 5.0  # seconds of a step; slower models are not timed
RISING = 50  # steps in which the learning rate rises
BATCHES = 16  # different batches


class Trainer:
    """Training steps of a model: forward pass under autocast, backward pass, fused AdamW.

    Args:
        model: language model on its device.
        tokens: `[N]`, text to train on.
        size: size of the batches, and the dtype of autocast.
        mode: one of `MODES`.
    """

    def __init__(self, model: nn.Module, tokens: Tensor, size: ModelSize, mode: str) -> None:
        self.model, self.size = model, size
        self.call: Callable[..., Any] = model
        if mode == "blocks":
            for block in next(module for module in model.modules() if isinstance(module, nn.ModuleList)):
                block.compile()
        elif mode != "eager":
            self.call = torch.compile(model, mode="reduce-overhead" if mode == "captured" else None)
        self.device = next(model.parameters()).device
        groups = optimizer_groups(model, learning_rate=3e-4, weight_decay=0.1)
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / RISING))
        windows = batches(tokens, size.seq_len, size.batch_size, str(self.device))
        self.data = cycle(list(islice(windows, BATCHES)))
        self.losses: list[Tensor] = []

    def step(self) -> None:
        """Take one step, without waiting for the device."""
        tokens, dtype = next(self.data), getattr(torch, self.size.dtype)
        torch.compiler.cudagraph_mark_step_begin()  # graphs may overwrite tensors of the step before
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            loss = self.call(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach().clone())

    def one_step(self) -> float:
        """Take a step and wait for the device; return the seconds."""
        begin = time.perf_counter()
        self.step()
        self.losses[-1].item()
        return time.perf_counter() - begin

    def milliseconds(self, steps: int) -> list[float]:
        """Return the milliseconds of each of several steps, one after the other without a pause."""
        if self.device.type == "cuda":
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
            marks[0].record()
            for mark in marks[1:]:
                self.step()
                mark.record()
            torch.cuda.synchronize()
            return [before.elapsed_time(after) for before, after in pairwise(marks)]
        times = [time.perf_counter()]
        for _ in range(steps):
            self.step()
            times.append(time.perf_counter())
        return [1e3 * (after - before) for before, after in pairwise(times)]

    def is_finite(self) -> bool:
        """Return whether all losses and all parameters are finite."""
        values = [*self.losses, *self.model.parameters()]
        return bool(torch.stack([value.isfinite().all() for value in values]).all())


def measure_row(cell: ModelCell, device: torch.device, on_prepared: Callable[[], None], limit: float) -> dict[str, Any]:
    """Return the measurements of a row; or, as its "status" and "reason", why there are none.

    Processes take their first steps side by side, except with flash-linear-attention, which times candidates for its
    kernels then. The other steps of each process have the machine alone.

    Args:
        cell: model, mode and size.
        device: device of the model.
        on_prepared: called after the first step; may raise `CellStopped`.
        limit: seconds after which the row is given up.
    """
    return row_or_reason(lambda: _measure(cell, device, on_prepared), limit)


def _measure(cell: ModelCell, device: torch.device, on_prepared: Callable[[], None]) -> dict[str, Any]:
    tuned = cell.model.startswith("fla") and has_fla()
    if tuned and device.type != "cuda":
        raise ArgumentError("devices", got=device.type, expected="a GPU, on which flash-linear-attention runs")
    tokens = word_tokens(cell.size.vocab_size)
    with hold(alone=tuned):
        with device:
            model = build(cell.model, cell.size).train()
        trainer = Trainer(model, tokens, cell.size, cell.mode)
    first = call_or_repeat_alone(trainer.one_step, partial(_free, trainer), alone=tuned)
    _free(trainer)
    on_prepared()
    with hold(alone=True):
        measurements = _steps(trainer, cell.steps)
    return {
        "status": "ok",
        "layers": model.config.num_hidden_layers,
        "parameters": sum(p.numel() for p in model.parameters()),
        "first_step_s": first,
        **measurements,
        "first_loss": trainer.losses[0].item(),
        "last_loss": trainer.losses[-1].item(),
        "finite": trainer.is_finite(),
    }


def _steps(trainer: Trainer, steps: int) -> dict[str, Any]:
    second = trainer.one_step()
    if second > SLOWEST:
        raise TimeLimitError(f"a step takes {second:.1f} s")
    for _ in range(WARM_UP - 1):
        trainer.step()
    tokens, cuda = trainer.size.batch_size * trainer.size.seq_len, trainer.device.type == "cuda"
    if not cuda:
        times = trainer.milliseconds(steps)
        ms = statistics.median(times)
        return {
            "ms": ms,
            "times_ms": [round(x, 3) for x in times],
            "tokens_per_s": 1e3 * tokens / ms,
            "step_memory": peak_cpu(trainer.step),
        }
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()  # weights and the state of the optimizer
    times = trainer.milliseconds(steps)
    ms, peak = statistics.median(times), torch.cuda.max_memory_allocated()
    kernels, gpu_ms = kernels_launched(trainer.step)
    return {
        "ms": ms,
        "times_ms": [round(x, 3) for x in times],
        "tokens_per_s": 1e3 * tokens / ms,
        "gpu_ms": gpu_ms,
        "kernels": kernels,
        "peak_memory": peak,
        "step_memory": peak - held,
    }


def _free(trainer: Trainer) -> None:
    """Return memory that no tensor uses to the GPU."""
    trainer.optimizer.zero_grad()
    gc.collect()
    if trainer.device.type == "cuda":
        torch.cuda.empty_cache()
