"""The oracle: the defining recursion of any design, sequence by sequence, token by token, in float64.

It is the specification that every kernel is held to, so it is written to be read, not to be fast. The recursion of an
op (predict, update, read) is in its folder, `ops/_<op>/oracle.py`, and imports torch alone; this file applies it to
sequences. It is differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kalmix.designs import Design
from kalmix.ops import OPS
from kalmix.segments import Segments
from kalmix.types import Filtered

Store = Callable[[Any], Any]

_STORE: ContextVar[Store | None] = ContextVar("kalmix_oracle_store", default=None)


@contextmanager
def transform_stored_beliefs(store: Store) -> Iterator[None]:
    """Replace the belief after each token by `store(belief)`, which may round it as a smaller dtype does."""
    token = _STORE.set(store)
    try:
        yield
    finally:
        _STORE.reset(token)


def oracle(
    design: Design,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    belief: Any = None,
    variance: bool = False,
    segments: Segments | None = None,
    **signals: Any,
) -> Filtered:
    """Filter any design by its definition.

    Args:
        design: what is assumed.
        q, k: `[B, T, H, K]`; v: `[B, T, G, V]`; any floating dtype, computed in float64.
        belief: prior with leading axis N, the design's default if absent.
        variance: also return the variance of the read-out, `[B, T, G, V]`, or `[B, T, G, 1]` where one serves all.
        segments: which tokens form which sequence; each batch row one if absent.
        signals: what the design takes beside q, k, v (`design.signals`), per token `[B, T, ...]` or, for
            transitions per cell, time-invariant `[G, K, V]`, or in time `[H]` and `[H, C]`. A `matrix` is
            `[B, T, G, K, K]`. Also the design's options (`design.options`), of which a solver changes nothing: the
            solution is exact.

    Returns:
        `Filtered`, all float64. Complexity: O(T) Python steps a sequence.

    Raises:
        DesignError: a signal is missing or not the design's, or the design has no variance.
    """
    signals = {name: x for name, x in signals.items() if x is not None}
    design.check(signals, variance)
    op = OPS[design.op]
    recursion, told = op.recursion, {name: signals.pop(name) for name in design.options if name in signals}
    q, k = q.double(), k.double()
    if not recursion.shares_keys:
        q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], dim=2) for x in (q, k))
    invariant = [name for name in recursion.invariant if name in signals and signals[name].ndim <= 3]
    everywhere = told | {name: signals[name].double() for name in invariant}
    per_token = {"q": q, "k": k, "v": v.double()}
    per_token |= {name: x.double() for name, x in signals.items() if name not in everywhere}

    segments = Segments.whole(v.shape[0], v.shape[1]) if segments is None else segments
    store = _STORE.get() or (lambda state: state)
    means, variances, finals = {}, {}, []
    for n, (row, start, stop) in enumerate(segments.rows.tolist()):
        if belief is None:
            state = op.belief(*recursion.prior(k.new_zeros(k.shape[2:]), per_token["v"].new_zeros(v.shape[2:])))
        else:
            state = type(belief)(*(leaf[n].double() if leaf.is_floating_point() else leaf[n] for leaf in belief))
        for t in range(start, stop):
            token = everywhere | {name: x[row, t] for name, x in per_token.items()}
            state = store(op.belief(*recursion.update(recursion.predict(state, token), token)))
            means[row, t], variances[row, t] = recursion.read(state, token)
        finals.append(state)

    def lay_out(reads: dict[tuple[int, int], Any], width: int) -> Tensor:
        nothing = v.new_zeros(v.shape[2], width, dtype=torch.float64)
        tokens = [reads.get((b, t), nothing) for b in range(v.shape[0]) for t in range(v.shape[1])]
        return (torch.stack(tokens) if tokens else nothing[:0]).reshape(*v.shape[:3], width)

    final = type(finals[0])(*(_stacked(leaf) for leaf in zip(*finals, strict=True))) if finals else belief
    spread = lay_out(variances, v.shape[3] if recursion.columns else 1) if variance else None
    return Filtered(lay_out(means, v.shape[3]), spread, final)


def _stacked(leaves: tuple[Tensor, ...]) -> Tensor:
    """One a sequence; of histories the shorter begin with slots that hold nothing."""
    longest = max(x.shape[0] for x in leaves)
    nothing = 0.0 if leaves[0].is_floating_point() else -1
    return torch.stack([pad(x, (0, 0) * (x.ndim - 1) + (longest - x.shape[0], 0), value=nothing) for x in leaves])
