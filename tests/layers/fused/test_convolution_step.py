"""Step of the short convolution: a server's batches agree with convolving each sequence alone."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kalmix import steps
from kalmix.beliefs import take
from kalmix.layers.fused import short_convolution, short_convolution_step
from kalmix.testing.scheduler import check_steps, make_workload
from kalmix.types import Filtered

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = ["torch", "triton"] if find_spec("triton") else ["torch"]
CHANNELS = 37


class Inputs(NamedTuple):
    v: Tensor


class State(NamedTuple):
    inputs: Tensor

    take = take


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("taps", "bias", "activation"), [(4, True, "silu"), (3, False, None), (1, True, None)])
def test_a_server_agrees_with_convolving_each_sequence_alone(taps, bias, activation, dtype, kernel):
    weight = normal(CHANNELS, taps, dtype=dtype)
    offset = normal(CHANNELS, seed=1, dtype=dtype) if bias else None

    def step(signals, pool, slots, out):
        y = short_convolution_step(
            signals.v, weight, offset, pool.inputs, slots, activation, out=out and out.mean, kernel=kernel
        )
        return Filtered(y, None, pool)

    def alone(signals, prior):
        double = [None if x is None else x.double() for x in (signals.v, weight, offset, prior.inputs)]
        y, state = short_convolution(*double, None, activation)
        return Filtered(y, None, State(state))

    workload = make_workload(
        Inputs(normal(5, 6, CHANNELS, seed=2, dtype=dtype)), State(normal(5, taps - 1, CHANNELS, seed=3, dtype=dtype))
    )
    check_steps(step, alone, workload, [4 * (taps + 2) * torch.finfo(dtype).eps, 0.0])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_step_reads_views_and_a_pool_of_many_layers(kernel):
    x, weight, pool = normal(3, 1, 2 * CHANNELS), normal(CHANNELS, 4), normal(6, 2, 3, CHANNELS)
    slots = steps.Slots(torch.tensor([4, 0, 2], device=DEVICE), torch.tensor([4, 1, -1], device=DEVICE))
    alone = pool[:, 1].clone()
    expected = short_convolution_step(x[..., :CHANNELS].contiguous(), weight, None, alone, slots, kernel=kernel)
    out = torch.empty_like(expected)
    got = short_convolution_step(x[..., :CHANNELS], weight, None, pool[:, 1], slots, out=out, kernel=kernel)
    assert torch.equal(out, expected)
    assert torch.equal(got, expected)
    assert torch.equal(pool[:, 1], alone)
