"""Map from real to positive numbers: one program computes a block of elements."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kalmix.layers.fused.dispatch import KNEE
from kalmix.ops._shared.triton.compile_and_launch import Launch

BLOCK, WARPS = 256, 4  # elements and warps of a program


@triton.jit(do_not_specialize=["count"])
def _forward_kernel(x, y, count, KNEE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(x + at, mask=at < count, other=0.0)
    size = tl.abs(raw)
    slow = KNEE * (1.0 + tl.log(tl.maximum(size, KNEE) / KNEE))
    slow = tl.where(raw != raw, raw, tl.where(raw < 0.0, -slow, slow))  # NaN stays NaN
    tl.store(y + at, tl.exp(tl.where(size <= KNEE, raw, slow)), mask=at < count)


@triton.jit(do_not_specialize=["count"])
def _backward_kernel(x, y, dy, dx, count, KNEE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(x + at, mask=at < count, other=0.0)
    size = tl.abs(raw)
    slope = tl.where(size <= KNEE, 1.0, KNEE / tl.where(size <= KNEE, 1.0, size))
    grad = tl.load(dy + at, mask=at < count, other=0.0) * tl.load(y + at, mask=at < count, other=0.0) * slope
    tl.store(dx + at, grad, mask=at < count)


def forward(raw: Tensor) -> Tensor:
    """Return the positive numbers, contiguous."""
    x, y = raw.contiguous(), raw.new_empty(raw.shape)
    Launch(_forward_kernel, (-(-x.numel() // BLOCK),), (x, y, x.numel()), _options(KNEE)).run()
    return y


def backward(raw: Tensor, result: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of `raw`, contiguous."""
    x, dx = raw.contiguous(), raw.new_empty(raw.shape)
    arguments = x, result.contiguous(), grad.contiguous(), dx, x.numel()
    Launch(_backward_kernel, (-(-x.numel() // BLOCK),), arguments, _options(KNEE)).run()
    return dx


def _options(knee: float) -> dict[str, float]:
    return {"KNEE": knee, "BLOCK": BLOCK, "num_warps": WARPS}
