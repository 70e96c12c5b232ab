"""Step of `delta`: one token for each row of a batch, in place on a pool of memories."""

from __future__ import annotations

from kalmix.beliefs import PointBelief
from kalmix.ops._delta import reference
from kalmix.ops._delta.signals import DeltaSignals
from kalmix.ops._shared.step import Slots, runs_triton, step_in_torch
from kalmix.types import Filtered


def delta(
    signals: DeltaSignals,
    pool: PointBelief,
    slots: Slots,
    *,
    out: Filtered | None = None,
    kernel: str | None = None,
) -> Filtered:
    """Filter one token for each row of a batch with the op `kalmix.ops.delta`, in place on a pool of memories.

    `kalmix.steps` describes pools, slots and `out`. A step does not check its arguments.

    Args:
        signals: signals of one token per row, T = 1: q and k `[B, 1, H, K]`, v `[B, 1, G, V]`, gain `[B, 1, G]` or `[B,
            1, G, K]`, and `log_decay` likewise or `None`. K is at most 256 in kernel "triton".
        pool: memories of N slots, mean `[N, G, K, V]`; updated in place.
        slots: slots that each row reads and writes.
        out: result of an earlier step, whose tensors are overwritten. Default: new tensors.
        kernel: "triton" or "torch". Default: "triton" on GPUs.

    Returns:
        `Filtered` with mean `[B, 1, G, V]` in the dtype of `v`, variance `None`, and the pool.

    Example:
        >>> from kalmix import PointBelief, ops, steps
        >>> q, k, v = torch.randn(2, 1, 1, 4), torch.randn(2, 1, 1, 4), torch.randn(2, 1, 3, 5)
        >>> gain = torch.rand(2, 1, 3)
        >>> pool = PointBelief(torch.zeros(8, 3, 4, 5))  # 8 slots
        >>> slots = steps.Slots(torch.tensor([6, 1]), torch.tensor([6, 1]))
        >>> y = steps.delta(steps.DeltaSignals(q, k, v, gain), pool, slots)
        >>> torch.allclose(y.mean, ops.delta(q, k, v, gain=gain).mean)
        True
    """
    if not runs_triton(pool, kernel):
        return step_in_torch(reference.delta, signals, pool, slots, (), out)
    from kalmix.ops._linear_memory.triton.step import step

    q, k, v, gain, log_decay = signals
    mean = step(q, k, v, gain, log_decay, pool.mean, slots, None if out is None else out.mean, corrects=True)
    return Filtered(mean, None, pool)
