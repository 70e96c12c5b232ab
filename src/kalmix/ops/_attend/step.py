"""Step of `attend`: one token for each row of a batch, in place on a pool of histories of fixed size."""

from __future__ import annotations

import torch

from kalmix.beliefs import HistoryBelief
from kalmix.ops._attend import reference
from kalmix.ops._attend.signals import AttendSignals
from kalmix.ops._shared.step import Slots, fill_output, runs_triton, store_rows, take_slots
from kalmix.types import Filtered, replace_fields


def attend(
    signals: AttendSignals,
    pool: HistoryBelief,
    slots: Slots,
    *,
    variance: bool = False,
    out: Filtered | None = None,
    kernel: str | None = None,
) -> Filtered:
    """Attend with one query for each row of a batch, as the op `kalmix.ops.attend` does, over a pool of histories.

    A history of the pool has room for S tokens: the token at position p of its sequence is at index p mod S, so that
    the S newest tokens are stored. S must be at least the window of `weighting`, or the length of the longest
    sequence; otherwise the result is that of a window of S tokens. `kalmix.steps.history_pool` makes an empty pool, and
    `kalmix.steps.store` loads histories that the op returns. `kalmix.steps` describes slots and `out`. A step does not
    check its arguments.

    A row whose slots differ copies the history that it reads. Kernel "torch" copies it in any case. Kernel "triton"
    reads visible tokens only, and allocates partial sums: at most 32 per row and key head.

    Args:
        signals: signals of one token per row, T = 1: q and k `[B, 1, H, 2 C]`, v `[B, 1, G, 2 D]`, times `[B, 1]` or
            `None` for one unit of time per token, dynamics of keys and values, and the options of the weights.
        pool: histories of N slots, keys `[N, S, H, 2 C]`, values `[N, S, G, 2 D]`, times and positions `[N, S]`;
            updated in place.
        slots: slots that each row reads and writes.
        variance: also return the variance.
        out: result of an earlier step, whose tensors are overwritten. Default: new tensors.
        kernel: "triton" or "torch". Default: "triton" on GPUs.

    Returns:
        `Filtered` with mean `[B, 1, G, 2 D]` in the dtype of `v`, variance `[B, 1, G, 1]` in the dtype of the pool or
        `None`, and the pool.

    Example:
        >>> from kalmix import steps
        >>> from kalmix.ops import Dynamics
        >>> q, k, v, one = torch.randn(2, 1, 1, 4), torch.randn(2, 1, 1, 4), torch.randn(2, 1, 1, 4), torch.ones(1)
        >>> dynamics = Dynamics(-0.1 * one, torch.ones(1, 2), one, one, one)
        >>> weighting = steps.Weighting(one, one, 0 * one, rational=True, window=16, causal=True)
        >>> signals = steps.AttendSignals(q, k, v, None, dynamics, None, weighting)
        >>> pool = steps.history_pool(8, 16, k, v)  # 8 slots of 16 tokens
        >>> y = steps.attend(signals, pool, steps.Slots(torch.tensor([6, 1]), torch.tensor([6, 1])))
        >>> torch.allclose(y.mean, v), pool.lengths.tolist()
        (True, [0, 1, 0, 0, 0, 0, 1, 0])
    """
    if not runs_triton(pool, kernel):
        return _step_in_torch(signals, pool, slots, variance, out)
    from kalmix.ops._attend.triton.step import step

    return Filtered(*step(signals, pool, slots, None if out is None else out[:2], variance), pool)


def _step_in_torch(
    signals: AttendSignals, pool: HistoryBelief, slots: Slots, variance: bool, out: Filtered | None
) -> Filtered:
    with torch.no_grad():
        rows = take_slots(pool, slots.read)
        positions = rows.positions
        position = positions.amax(1, keepdim=True) + 1
        index = position % positions.shape[1]
        last = torch.where(positions >= 0, rows.times, -torch.inf).amax(1, keepdim=True)
        times = torch.where(position > 0, last + 1, 0.0) if signals.times is None else signals.times.double()
        positions.scatter_(1, index, -1)  # the oldest token, if the history is full
        mean, read_variance, _ = reference.attend(replace_fields(signals, times=times), rows, None, variance)
        for buffer, x in ((rows.keys, signals.k), (rows.values, signals.v)):
            where = index[..., None, None].expand(-1, 1, *buffer.shape[2:])
            buffer.scatter_(1, where, x.to(buffer.dtype))
        rows.times.scatter_(1, index, times)
        positions.scatter_(1, index, position)
        store_rows(pool, slots, rows)
        return fill_output(Filtered(mean, read_variance, pool), slots, out)
