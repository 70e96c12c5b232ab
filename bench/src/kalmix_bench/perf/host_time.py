"""Time the host code (Python and PyTorch) of the Triton kernels of every op: checks, autograd, allocation, launches.

    python -m kalmix_bench.perf.host_time                       # a GPU if there is one
    python -m kalmix_bench.perf.host_time --profile delta       # functions that take most of the time of an op

Without a GPU, launches run all of Triton's Python code, but compile and execute nothing; the figures then lack the time
of CUDA's own functions. Shapes are small, so that the host determines the time on a GPU, too. On a GPU a backward pass
runs in another thread, which takes time to wake up; in the last column several calls share one backward pass, as they
do in a model. Last come, for scale, a custom op of `torch.library` and a `torch.autograd.Function` with as many tensors
as `delta` has.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

import kalmix
from kalmix.ops import OPS
from kalmix.ops._shared import environment
from kalmix.ops._shared.custom_op import custom_op, register_backward
from kalmix_bench.perf.workloads import Signals, signals

SHAPE = (2, 128, 2, 64)
DIAGONAL_SHAPE = (2, 128, 64, 16)
CASES = [("additive", "head"), ("additive", "key"), ("delta", "head"), ("delta", "key"), ("dense", "head"),
         ("dense", "key"), ("diagonal", "head"), ("ridge", "head"), ("attend", "head")]  # fmt: skip
SHARING = 8  # calls that share a backward pass
PROFILED_CALLS = 500


class _NoBinary(CompiledKernel):
    """Compiled kernel whose launch does nothing."""

    def __init__(self) -> None:
        self.name, self.src = "", None
        self.module = self.function = self.packed_metadata = ()
        self._run = lambda *_arguments: None


class _NoDriver:
    """Driver of Triton without a GPU."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def _store_no_binary(kernel: JITFunction, key: str, _signature: Any, device: int, *_: Any, **__: Any) -> Any:
    """Stand in for `JITFunction._do_compile`."""
    return kernel.device_caches[device][0].setdefault(key, _NoBinary())


@contextmanager
def without_gpu() -> Iterator[None]:
    """Let Triton kernels be launched with CPU tensors; they do nothing."""
    stream = SimpleNamespace(wait_stream=lambda _: None, wait_event=lambda _: None, record_event=lambda: None)
    previous = triton.runtime.driver._active
    triton.runtime.driver.set_active(_NoDriver())
    with ExitStack() as stack:
        stack.enter_context(kalmix.checks(False))
        stack.enter_context(patch.object(JITFunction, "_do_compile", _store_no_binary))
        stack.enter_context(patch.object(environment, "uses_triton_interpreter", lambda: True))
        for name, function in {
            "current_device": lambda: 0,
            "current_stream": lambda: stream,
            "Stream": lambda *_, **__: stream,
            "stream": lambda _: nullcontext(),
            "set_device": lambda _: None,
        }.items():
            stack.enter_context(patch.object(torch.cuda, name, function))
        try:
            yield
        finally:
            triton.runtime.driver._active = previous


def _run(op: str, x: Signals) -> Tensor:
    return OPS[op].function(**x, kernel="triton").mean


def _bare() -> tuple[Callable[[Signals], Tensor], Callable[[Signals], Tensor]]:
    """Return calls of a custom op and of an `autograd.Function` that do nothing but allocate their results."""

    def forward(
        q: Tensor, k: Tensor, v: Tensor, decay: Tensor, gain: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return torch.empty_like(v), *(torch.empty_like(v) for _ in range(4))

    def backward(
        q: Tensor, k: Tensor, v: Tensor, decay: Tensor, gain: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(decay), gain.clone()

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs, *output[2:])
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)

    op = custom_op("kalmix_bench::bare", forward, forward)
    backward_op = custom_op("kalmix_bench::bare_backward", backward, backward)
    register_backward(op, "bare", setup, lambda ctx, grad, *_: backward_op(*ctx.saved_tensors[:5], grad))

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
            output = forward(*inputs)
            setup(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, ...]:
            return backward(*ctx.saved_tensors[:5], grad)

    return lambda x: op(*x.values())[0], lambda x: Bare.apply(*x.values())[0]


def microseconds(call: Callable[[], object], seconds: float, device: str) -> float:
    """Return the time until a call returns, without later work of the GPU: the median on a GPU, else the minimum."""
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 10 or time.perf_counter() < deadline:
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e6 * (statistics.median(times) if device == "cuda" else min(times))


class Calls(NamedTuple):
    """Calls of an op: forward without gradients, forward with backward, `SHARING` times forward with one backward."""

    forward: Callable[[], object]
    training: Callable[[], object]
    sharing: Callable[[], object]


def calls(op: str, decay: str, device: str) -> Calls:
    """Return the calls of an op that are timed."""
    x = signals(op, decay, DIAGONAL_SHAPE if op == "diagonal" else SHAPE, device, torch.bfloat16)
    return _calls(partial(_run, op), x)


def _calls(run: Callable[[Signals], Tensor], x: Signals) -> Calls:
    upstream = torch.ones_like(run(x))

    def train(inputs: list[Signals]) -> None:
        leaves = [tensor for each in inputs for tensor in each.values()]
        torch.autograd.grad([run(each) for each in inputs], leaves, [upstream] * len(inputs), allow_unused=True)

    copies = [{name: tensor.detach().requires_grad_() for name, tensor in x.items()} for _ in range(SHARING)]
    return Calls(torch.no_grad()(partial(run, x)), partial(train, [x]), partial(train, copies))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", metavar="OP", help="Print the functions that take most time")
    parser.add_argument("--seconds", type=float, default=1.0, help="Time per row and column (default: 1)")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with nullcontext() if device == "cuda" else without_gpu():
        if options.profile:
            print_profile(calls(options.profile, "head", device).training)
            return
        print(f"microseconds of host time per call ({device})\n")
        print(f"{'op':24}{'forward':>10}{'forward + backward':>20}{f'{SHARING} calls, 1 backward':>24}")
        x = signals("delta", "head", SHAPE, device, torch.bfloat16)
        rows = {f"{op}, decay per {decay}": calls(op, decay, device) for op, decay in CASES}
        for name, run in zip(("bare custom op", "bare autograd.Function"), _bare(), strict=True):
            rows[name] = _calls(run, x)
        for name, timed in rows.items():
            for call in timed:
                microseconds(call, options.seconds / 5, device)  # warm up
            forward, training, sharing = (microseconds(call, options.seconds, device) for call in timed)
            print(f"{name:24}{forward:10.0f}{training:20.0f}{sharing / SHARING:24.0f}", flush=True)


def print_profile(call: Callable[[], object]) -> None:
    """Print the functions in which `PROFILED_CALLS` calls spend most time."""
    for _ in range(PROFILED_CALLS // 10):
        call()
    with cProfile.Profile() as profile:
        for _ in range(PROFILED_CALLS):
            call()
    pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
