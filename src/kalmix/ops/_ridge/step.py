"""Step of `ridge`: one token for each row of a batch, in place on a pool of sums."""

from __future__ import annotations

from kalmix.beliefs import RidgeBelief
from kalmix.ops._ridge import reference
from kalmix.ops._ridge.signals import RidgeSignals
from kalmix.ops._ridge.solvers import Adaptive, Chebyshev, ConjugateGradient, Ridge, Solver
from kalmix.ops._shared.step import Slots, runs_triton, step_in_torch
from kalmix.types import Filtered

DEFAULT_RIDGE, DEFAULT_SOLVER = Adaptive(), Chebyshev()


def ridge(
    signals: RidgeSignals,
    pool: RidgeBelief,
    slots: Slots,
    *,
    ridge: Ridge = DEFAULT_RIDGE,
    solver: Solver = DEFAULT_SOLVER,
    variance: bool = False,
    out: Filtered | None = None,
    kernel: str | None = None,
) -> Filtered:
    """Filter one token for each row of a batch with the op `kalmix.ops.ridge`, in place on a pool of sums.

    `kalmix.steps` describes pools, slots and `out`. A step does not check its arguments.

    Args:
        signals: signals of one token per row, T = 1: q and k `[B, 1, H, K]`, v `[B, 1, G, V]`, log_decay, gain and mix
            `[B, 1, G]` or `None`. K is at most 256 in kernel "triton".
        pool: sums of N slots, cross `[N, G, K, V]` and gram `[N, G, K, K]`; updated in place.
        slots: slots that each row reads and writes.
        ridge: as in the op; a number is not accepted.
        solver: as in the op. `Exact` and `Sketch` run in kernel "torch" on every device.
        variance: also return the variance.
        out: result of an earlier step, whose tensors are overwritten. Default: new tensors.
        kernel: "triton" or "torch". Default: "triton" on GPUs.

    Returns:
        `Filtered` with mean `[B, 1, G, V]` in the dtype of `v`, variance `[B, 1, G, 1]` in the dtype of the pool or
        `None`, and the pool.

    Example:
        >>> from kalmix import RidgeBelief, ops, steps
        >>> q, k, v = torch.randn(2, 1, 1, 4), torch.randn(2, 1, 1, 4), torch.randn(2, 1, 3, 5)
        >>> pool = RidgeBelief(torch.zeros(8, 3, 4, 5), torch.zeros(8, 3, 4, 4))  # 8 slots
        >>> slots = steps.Slots(torch.tensor([6, 1]), torch.tensor([6, 1]))
        >>> y = steps.ridge(steps.RidgeSignals(q, k, v), pool, slots)
        >>> torch.allclose(y.mean, ops.ridge(q, k, v).mean)
        True
    """
    if not isinstance(solver, Chebyshev | ConjugateGradient) or not runs_triton(pool, kernel):
        return step_in_torch(reference.ridge, signals, pool, slots, (variance, ridge, solver), out)
    from kalmix.ops._ridge.triton.step import step

    return Filtered(*step(signals, pool, slots, None if out is None else out[:2], variance, ridge, solver), pool)
