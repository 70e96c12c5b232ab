"""Step of cells with the parts around it: from a projected token to the gated read-out, in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.beliefs import DiagonalBelief
from kalmix.layers.fused.cell_inputs import GatedSkip, RawCellSignals
from kalmix.ops._shared.custom_op import needs_grad
from kalmix.ops._shared.step import Slots, runs_triton
from kalmix.validation import FLOAT32_STATE_DTYPES


def can_fuse_cells(signals: RawCellSignals, skip: GatedSkip, pool: DiagonalBelief, kernel: str | None) -> bool:
    """Return whether `cell_step` accepts these arguments; otherwise compute its parts one after another.

    `cell_step` computes in float32, without gradients. `kernel` is the argument of `kalmix.steps.diagonal`.
    """
    tensors = [*signals, skip.z, skip.gate]
    return (
        runs_triton(pool, kernel)
        and pool.mean.dtype == torch.float32
        and not torch.compiler.is_compiling()
        and all(x.dtype in FLOAT32_STATE_DTYPES and x.stride(2) == 1 for x in tensors)
        and not needs_grad(*tensors, skip.scale)
    )


def cell_step(
    signals: RawCellSignals, skip: GatedSkip, dynamics: tuple[Tensor, Tensor], pool: DiagonalBelief, slots: Slots
) -> Tensor:
    """Filter one token for each row of a batch, in place on a pool of cells, and apply skip and gate.

        q, k = q / |q|, k / |k|;  precision = 1 / (softplus(noise) + floor)
        y = (read + scale z) silu(gate),   read = diagonal(q, k, v, precision, log_decay, process_noise)

    It is `l2_normalize`, `softplus_precision`, `kalmix.steps.diagonal` and `gated_skip` in one kernel, and rounds where
    they round. `floor` is `NOISE_FLOOR`. `kalmix.steps` describes pools and slots. The output of a row of padding is 0.

    Args:
        signals: projected tokens.
        skip: skip connection and gate.
        dynamics: log-decay and process noise, float32 `[S, C]` each.
        pool: cells of N slots, mean and variance `[N, 1, S, C]`; updated in place.
        slots: slots that each row reads and writes.

    Returns:
        y `[B, 1, C]` in the dtype of `v`.
    """
    from kalmix.layers.fused.triton.cell_step import step

    return step(signals, skip, dynamics, pool, slots)
