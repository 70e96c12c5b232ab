"""Control towards waypoints: one program steers all heads of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.layers.fused.dispatch import KNEE
from kalmix.layers.fused.triton.trajectory_step import positive_value
from kalmix.ops._shared.triton.compile_and_launch import Launch


@triton.jit
def steer_kernel(
    predicted, down, up, log_weight, log_decay, result,
    N: tl.constexpr, C: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
    KNEE: tl.constexpr,
):  # fmt: skip
    """Map the states of a row to their waypoints and steer them."""
    row, column, rank = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS), tl.arange(0, RANKS)
    has_column = column < N
    inside = (rank < RANK)[:, None] & has_column[None, :]
    x = tl.load(predicted + row * N + column, mask=has_column, other=0.0).to(tl.float32)
    weight = tl.load(down + rank[:, None] * N + column[None, :], mask=inside, other=0.0).to(tl.float32)
    inner = tl.sum(weight * x[None, :], 1)
    weight = tl.load(up + column[None, :] * RANK + rank[:, None], mask=inside, other=0.0).to(tl.float32)
    waypoint = tl.sum(weight * inner[:, None], 0)
    head, channel = column // (2 * C), column % C
    size = -2.0 * tl.load(log_decay + head, mask=has_column, other=-1.0).to(tl.float32)
    small = tl.minimum(size, 0.25)  # 1 - e^-size cancels
    series = 1.0 - small / 2 * (1.0 - small / 3 * (1.0 - small / 4 * (1.0 - small / 5 * (1.0 - small / 6))))
    gain = tl.where(size <= 0.25, series, (1.0 - tl.exp(-size)) / tl.maximum(size, 0.25))
    gain *= positive_value(tl.load(log_weight + head * C + channel, mask=has_column, other=0.0).to(tl.float32), KNEE)
    steered = x + gain / (1.0 + gain) * (waypoint - x)
    tl.store(result + row * N + column, steered.to(result.dtype.element_ty), mask=has_column)


def steer(predicted: Tensor, down: Tensor, up: Tensor, log_weight: Tensor, log_decay: Tensor) -> Tensor:
    """Launch the kernel; see `steer_step`."""
    result = torch.empty_like(predicted)
    rank, columns = down.shape
    padded, ranks = triton.next_power_of_2(columns), triton.next_power_of_2(rank)
    Launch(steer_kernel, (predicted.shape[0],), (predicted, down, up, log_weight, log_decay, result), {
        "N": columns, "C": log_weight.shape[1], "RANK": rank, "COLUMNS": padded, "RANKS": ranks, "KNEE": KNEE,
        "num_warps": min(16, max(1, padded * ranks // 1024)),
    }).run()  # fmt: skip
    return result
