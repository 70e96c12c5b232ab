"""Step of cells and the parts around it in one kernel: it agrees with these parts in float64."""

from __future__ import annotations

import pytest
import torch
from forms import DEVICE

from kalmix import DiagonalBelief, steps
from kalmix.layers import KLA
from kalmix.layers.fused import (
    GatedSkip,
    RawCellSignals,
    can_fuse_cells,
    cell_step,
    gated_skip,
    l2_normalize,
    softplus_precision,
)
from kalmix.layers.fused.precision import NOISE_FLOOR

pytest.importorskip("triton")
READ, WRITE = [2, -1, 0, 4], [2, -1, 3, -1]  # in place, padding, a copy, and a state that is not stored


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def inputs(slots, channels, dtype):
    """Return arguments of `cell_step` for four rows; signals, z and gate are views of wider tensors."""
    torch.manual_seed(slots)
    projected = torch.randn(4, 1, 2 * slots + 2 * channels, device=DEVICE).to(dtype)
    wide = torch.randn(4, 1, 2 * channels, device=DEVICE).to(dtype)
    q, k, v, noise = projected.split([slots, slots, channels, channels], -1)
    z, gate = wide.chunk(2, -1)
    signals = RawCellSignals(q, k, v, 20 * noise)
    skip = GatedSkip(z, torch.randn(channels, device=DEVICE).to(dtype), gate)
    dynamics = -torch.rand(slots, channels, device=DEVICE), torch.rand(slots, channels, device=DEVICE)
    mean, variance = torch.randn(5, 1, slots, channels, device=DEVICE), torch.rand(5, 1, slots, channels, device=DEVICE)
    return signals, skip, dynamics, DiagonalBelief(mean, variance)


def parts(signals, skip, dynamics, pool, slots):
    """Compute `cell_step` from its parts, in PyTorch."""
    q, k, v, noise = (x.double() for x in signals)
    per_token = (l2_normalize(q), l2_normalize(k), v, softplus_precision(noise, NOISE_FLOOR))
    arguments = (x[:, :, None] for x in per_token)
    given = steps.DiagonalSignals(*arguments, *(x.double()[None] for x in dynamics))
    read = steps.diagonal(given, pool, slots, kernel="torch").mean[:, :, 0]
    y = gated_skip(read, skip.z.double(), skip.scale.double(), skip.gate.double())
    return torch.where((slots.read >= 0)[:, None, None], y, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("slots", "channels"), [(3, 5), (16, 40), (1, 33)])
def test_one_kernel_agrees_with_the_parts(slots, channels, dtype):
    signals, skip, dynamics, pool = inputs(slots, channels, dtype)
    rows = steps.Slots(torch.tensor(READ, device=DEVICE), torch.tensor(WRITE, device=DEVICE))
    exact = DiagonalBelief(*(x.double() for x in pool))
    expected = parts(signals, skip, dynamics, exact, rows)
    assert can_fuse_cells(signals, skip, pool, "triton")
    y = cell_step(signals, skip, dynamics, pool, rows)
    assert y.dtype == dtype
    assert not y[1].any()
    tolerance = 1e-5 if dtype == torch.float32 else 0.03  # keys and read-outs are rounded to the dtype
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    for got, want in zip(pool, exact, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rank", [None, 3])
def test_a_layer_steps_alike_with_and_without_the_kernel(rank):
    torch.manual_seed(0)
    layer, x = KLA(12, slots=3, rank=rank).to(DEVICE), torch.randn(4, 1, 12, device=DEVICE)
    rows = steps.Slots(torch.tensor(READ, device=DEVICE), torch.tensor(WRITE, device=DEVICE))
    found = []
    for kernel in ("reference", "triton"):
        layer.kernel, pool = kernel, layer.state_pool(5)
        found.append((layer.step(x, pool, rows), layer.step(x, pool, rows), *pool.belief, pool.conv_state))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_steps_with_gradients_or_in_float64_are_not_fused():
    signals, skip, _, pool = inputs(3, 5, torch.float32)
    double = DiagonalBelief(*(x.double() for x in pool))
    assert not can_fuse_cells(signals, skip, double, "triton")
    assert not can_fuse_cells(signals, skip, pool, "torch")
    with torch.enable_grad():
        assert not can_fuse_cells(signals, skip._replace(scale=skip.scale.requires_grad_()), pool, "triton")
