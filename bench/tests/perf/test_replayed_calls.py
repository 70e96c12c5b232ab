"""Tests that replayed calls of Triton kernels return what the first call did."""

import pytest
import torch

pytest.importorskip("triton")

from kalmix.ops import OPS
from kalmix_bench.perf.host_time import CASES
from kalmix_bench.perf.workloads import signals

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter replays nothing")
@pytest.mark.parametrize("length", [40, 200])
@pytest.mark.parametrize(("op", "decay"), CASES)
def test_replayed_calls_agree_with_the_first_call(op, decay, length):
    shape = (2, length, 4, 16) if op == "diagonal" else (2, length, 2, 32)

    def results(x):
        mean = OPS[op].function(**x, kernel="triton").mean
        grads = torch.autograd.grad(mean.float().square().sum(), list(x.values()), allow_unused=True)
        return [y for y in (mean, *grads) if y is not None]

    x = signals(op, decay, shape, DEVICE, torch.bfloat16)
    other = {name: (y.detach() / 2).requires_grad_() for name, y in x.items()}  # positive if `x` is
    first, *_ = [results(y) for y in (x, other, other)]
    for got, expected in zip(results(x), first, strict=True):
        assert torch.equal(got, expected)
