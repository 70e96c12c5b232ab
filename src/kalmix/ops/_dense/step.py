"""Step of `dense`: one token for each row of a batch, in place on a pool of beliefs."""

from __future__ import annotations

from kalmix.beliefs import DenseBelief
from kalmix.ops._dense import reference
from kalmix.ops._dense.signals import DenseSignals
from kalmix.ops._shared.step import Slots, runs_triton, step_in_torch
from kalmix.types import Filtered

MAX_ROTATED_KEYS = 128  # of kernel "triton"


def dense(
    signals: DenseSignals,
    pool: DenseBelief,
    slots: Slots,
    *,
    variance: bool = False,
    out: Filtered | None = None,
    kernel: str | None = None,
) -> Filtered:
    """Filter one token for each row of a batch with the op `kalmix.ops.dense`, in place on a pool of beliefs.

    `kalmix.steps` describes pools, slots and `out`. A step does not check its arguments.

    Args:
        signals: signals of one token per row, T = 1: q and k `[B, 1, H, K]`, v `[B, 1, G, V]`, obs_noise and
            process_noise `[B, 1, G]`, log_decay and angle as in the op. K is at most 256 in kernel "triton". With
            angles and K above 128, kernel "torch" runs on every device.
        pool: beliefs of N slots, mean `[N, G, K, V]` and covariance `[N, G, K, K]`; updated in place.
        slots: slots that each row reads and writes.
        variance: also return the variance.
        out: result of an earlier step, whose tensors are overwritten. Default: new tensors.
        kernel: "triton" or "torch". Default: "triton" on GPUs.

    Returns:
        `Filtered` with mean `[B, 1, G, V]` in the dtype of `v`, variance `[B, 1, G, 1]` in the dtype of the pool or
        `None`, and the pool.

    Example:
        >>> from kalmix import DenseBelief, ops, steps
        >>> q, k, v = torch.randn(2, 1, 1, 4), torch.randn(2, 1, 1, 4), torch.randn(2, 1, 3, 5)
        >>> noise = {"obs_noise": torch.ones(2, 1, 3), "process_noise": torch.zeros(2, 1, 3)}
        >>> pool = DenseBelief(torch.zeros(8, 3, 4, 5), torch.eye(4).repeat(8, 3, 1, 1))  # 8 slots
        >>> slots = steps.Slots(torch.tensor([6, 1]), torch.tensor([6, 1]))
        >>> y = steps.dense(steps.DenseSignals(q, k, v, **noise), pool, slots)
        >>> torch.allclose(y.mean, ops.dense(q, k, v, **noise).mean)
        True
    """
    too_wide = signals.angle is not None and signals.k.shape[3] > MAX_ROTATED_KEYS
    if too_wide or not runs_triton(pool, kernel):
        return step_in_torch(reference.dense, signals, pool, slots, (variance,), out)
    from kalmix.ops._dense.triton.step import step

    return Filtered(*step(signals, pool, slots, None if out is None else out[:2], variance), pool)
