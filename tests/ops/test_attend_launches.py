"""Launches of the Triton kernels of `attend`, on a CPU that runs none of them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from launch_log import log_launches
from test_attend_triton import DEVICE, HALF, PLAIN, arguments, call_kernel, outputs_and_gradients
from torch.utils._python_dispatch import TorchDispatchMode

from kalmix.ops._attend import custom_op as triton_kernel
from kalmix.ops._shared import custom_op
from kalmix.ops._shared.triton import compile_and_launch
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.segments import Segments


@pytest.mark.skipif(DEVICE == "cuda", reason="logs launches without running them")
def test_packed_sequences_add_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch computes parameters, but neither layouts nor masks."""
    log_launches(monkeypatch)
    launches: list[str] = []
    monkeypatch.setattr(Launch, "run", lambda launch: launches.append(launch.kernel.__name__))
    monkeypatch.setattr(custom_op, "_is_plain_call", lambda inputs: True)
    monkeypatch.setattr(compile_and_launch, "precompile", lambda *_, **__: None)
    inputs, timing = arguments(1, 70, (1, 1), (4, 4), False, HALF, 3, 0)
    counts = []
    for segments in (None, Segments.packed(torch.tensor([0, 30, 30, 70]))):
        launches.clear()
        given = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        times, *history = (x[: 1 if segments is None else 3] for x in timing)
        with CountWork() as work:
            mean = call_kernel(triton_kernel.attend, given, (times, history[0], history[1]), PLAIN, segments).mean
            torch.autograd.grad(mean, list(given.values()), torch.ones_like(mean))
        counts.append((len(launches), work.count))
    (plain_launches, plain_work), (packed_launches, packed_work) = counts
    assert packed_launches == plain_launches + 2 and packed_work <= plain_work


class CountWork(TorchDispatchMode):
    """Count the operations of PyTorch that a GPU would launch a kernel for: not views, not allocations."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        name = func.overloadpacket.__name__
        self.count += not (func.is_view or "empty" in name or name in ("detach", "_unsafe_view"))
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(DEVICE == "cuda", reason="logs launches without running them")
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_dry_run_compiles_every_launched_kernel(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_launches(monkeypatch)
    inputs, timing = arguments(1, 70, (1, 2), (6, 6), False, dtype, 1, 0)
    outputs_and_gradients(triton_kernel.attend, inputs, timing, PLAIN, None)
    assert log[True] == log[False]
    attention = {"token_blocks_kernel", "attend_kernel", "query_grads_kernel", "key_grads_kernel"}
    assert {name for name, *_ in log[True]} == attention | {"rotate_kernel", "rotate_backward_kernel"}
