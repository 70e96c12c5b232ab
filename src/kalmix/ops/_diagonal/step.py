"""Step of `diagonal`: one token for each row of a batch, in place on a pool of cells."""

from __future__ import annotations

from kalmix.beliefs import DiagonalBelief
from kalmix.ops._diagonal import reference
from kalmix.ops._diagonal.signals import DiagonalSignals
from kalmix.ops._shared.step import Slots, runs_triton, step_in_torch
from kalmix.types import Filtered


def diagonal(
    signals: DiagonalSignals,
    pool: DiagonalBelief,
    slots: Slots,
    *,
    variance: bool = False,
    out: Filtered | None = None,
    kernel: str | None = None,
) -> Filtered:
    """Filter one token for each row of a batch with the op `kalmix.ops.diagonal`, in place on a pool of cells.

    `kalmix.steps` describes pools, slots and `out`. A step does not check its arguments.

    Args:
        signals: signals of one token per row, T = 1: q and k `[B, 1, H, K]`, v and precision `[B, 1, G, V]`, log_decay
            and process_noise `[G, K, V]` or `[B, 1, G, K, V]`.
        pool: cells of N slots, mean and variance `[N, G, K, V]`; updated in place.
        slots: slots that each row reads and writes.
        variance: also return the variance.
        out: result of an earlier step, whose tensors are overwritten. Default: new tensors.
        kernel: "triton" or "torch". Default: "triton" on GPUs.

    Returns:
        `Filtered` with mean `[B, 1, G, V]` in the dtype of `v`, variance `[B, 1, G, V]` in the dtype of the pool or
        `None`, and the pool.

    Example:
        >>> from kalmix import DiagonalBelief, steps
        >>> q, k, v = torch.randn(2, 1, 1, 4), torch.randn(2, 1, 1, 4), torch.randn(2, 1, 3, 5)
        >>> signals = steps.DiagonalSignals(q, k, v, torch.ones(2, 1, 3, 5), torch.zeros(3, 4, 5), torch.zeros(3, 4, 5))
        >>> pool = DiagonalBelief(torch.zeros(8, 3, 4, 5), torch.ones(8, 3, 4, 5))  # 8 slots
        >>> slots = steps.Slots(torch.tensor([6, 1]), torch.tensor([6, 1]))
        >>> steps.diagonal(signals, pool, slots, variance=True).variance.shape
        torch.Size([2, 1, 3, 5])
        >>> bool((pool.variance[6] <= 1).all()), bool((pool.variance[0] == 1).all())
        (True, True)
    """
    if not runs_triton(pool, kernel):
        return step_in_torch(reference.diagonal, signals, pool, slots, (variance,), out)
    from kalmix.ops._diagonal.triton.step import step

    return Filtered(*step(signals, pool, slots, None if out is None else out[:2], variance), pool)
