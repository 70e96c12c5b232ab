"""Step of `additive`: one token for each row of a batch, in place on a pool of memories."""

from __future__ import annotations

from kalmix.beliefs import PointBelief
from kalmix.ops._additive import reference
from kalmix.ops._additive.signals import AdditiveSignals
from kalmix.ops._shared.step import Slots, runs_triton, step_in_torch
from kalmix.types import Filtered


def additive(
    signals: AdditiveSignals,
    pool: PointBelief,
    slots: Slots,
    *,
    out: Filtered | None = None,
    kernel: str | None = None,
) -> Filtered:
    """Filter one token for each row of a batch with the op `kalmix.ops.additive`, in place on a pool of memories.

    `kalmix.steps` describes pools, slots and `out`. A step does not check its arguments.

    Args:
        signals: signals of one token per row, T = 1: q and k `[B, 1, H, K]`, v `[B, 1, G, V]`, `log_decay` `[B, 1, G]`,
            `[B, 1, G, K]` or `None`, and gain `[B, 1, G]` or `None`. K is at most 256 in kernel "triton".
        pool: memories of N slots, mean `[N, G, K, V]`; updated in place.
        slots: slots that each row reads and writes.
        out: result of an earlier step, whose tensors are overwritten. Default: new tensors.
        kernel: "triton" or "torch". Default: "triton" on GPUs.

    Returns:
        `Filtered` with mean `[B, 1, G, V]` in the dtype of `v`, variance `None`, and the pool.

    Example:
        >>> from kalmix import PointBelief, ops, steps
        >>> q, k, v = torch.randn(2, 1, 1, 4), torch.randn(2, 1, 1, 4), torch.randn(2, 1, 3, 5)
        >>> pool = PointBelief(torch.zeros(8, 3, 4, 5))  # 8 slots
        >>> slots = steps.Slots(torch.tensor([6, 1]), torch.tensor([6, 1]))
        >>> y = steps.additive(steps.AdditiveSignals(q, k, v), pool, slots)
        >>> torch.allclose(y.mean, ops.additive(q, k, v).mean)
        True
    """
    if not runs_triton(pool, kernel):
        return step_in_torch(reference.additive, signals, pool, slots, (), out)
    from kalmix.ops._linear_memory.triton.step import step

    q, k, v, log_decay, gain = signals
    mean = step(q, k, v, gain, log_decay, pool.mean, slots, None if out is None else out.mean, corrects=False)
    return Filtered(mean, None, pool)
