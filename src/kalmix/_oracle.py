"""The oracle: the defining recursion of any design, sequence by sequence, token by token, in float64.

It is the specification that every kernel is held to, so it is written to be read, not to be fast: a filter is
three functions (predict, update, read), textbook formulas, and it imports no op. It is differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.beliefs import DiagonalBelief
from kalmix.designs import Design
from kalmix.segments import Segments
from kalmix.types import Filtered


class Recursion(NamedTuple):
    """A filter for one sequence: beliefs and signals here have neither a batch nor a time axis."""

    prior: Callable[..., Any]
    predict: Callable[..., Any]
    update: Callable[..., Any]
    read: Callable[..., tuple[Tensor, Tensor]]


def _prior_cells(k: Tensor, v: Tensor) -> DiagonalBelief:
    shape = (*k.shape, v.shape[-1])
    return DiagonalBelief(k.new_zeros(shape), k.new_ones(shape))


def _predict_cells(belief: DiagonalBelief, token: dict[str, Tensor]) -> DiagonalBelief:
    """Equation 7: z ~ N(a z, p)."""
    decay = token["log_decay"].exp() if "log_decay" in token else 1.0
    noise = token.get("process_noise", 0.0)
    return DiagonalBelief(decay * belief.mean, decay**2 * belief.variance + noise)


def _update_cells(belief: DiagonalBelief, token: dict[str, Tensor]) -> DiagonalBelief:
    """Equation 9 by Table 5's gain P k / (k P k + 1/precision), written so that precision may be 0."""
    key, value, precision = token["k"][..., None], token["v"][..., None, :], token["precision"][..., None, :]
    gain = belief.variance * key * precision / (1 + key * belief.variance * key * precision)
    return DiagonalBelief(belief.mean + gain * (value - key * belief.mean), (1 - gain * key) * belief.variance)


def _read_cells(belief: DiagonalBelief, token: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Algorithm 1, lines 12 and 14."""
    query = token["q"][..., None]
    return (query * belief.mean).sum(-2), (query**2 * belief.variance).sum(-2)


RECURSIONS = {"diagonal": Recursion(_prior_cells, _predict_cells, _update_cells, _read_cells)}


def oracle(
    design: Design,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    belief: Any = None,
    variance: bool = False,
    segments: Segments | None = None,
    **signals: Tensor,
) -> Filtered:
    """Filter any design by its definition.

    Args:
        design: what is assumed.
        q, k: `[B, T, H, K]`; v: `[B, T, G, V]`; any floating dtype, computed in float64.
        belief: prior with leading axis N, the design's default if absent.
        variance: also return the variance of the read-out, `[B, T, G, V]`.
        segments: which tokens form which sequence; each batch row one if absent.
        signals: what the design takes beside q, k, v (`design.signals`), per token `[B, T, ...]` or, for
            transitions per cell, time-invariant `[G, K, V]`.

    Returns:
        `Filtered`, all float64. Complexity: O(T) Python steps a sequence.

    Raises:
        DesignError: a signal is missing or not the design's.
    """
    design.check(signals)
    recursion = RECURSIONS[design.op]
    groups = v.shape[2] // k.shape[2]
    q, k = (x.double().repeat_interleave(groups, dim=2) for x in (q, k))
    everywhere = {name: x.double() for name, x in signals.items() if x.ndim == 3 and name in design.transition.signals}
    per_token = {"q": q, "k": k, "v": v.double()}
    per_token |= {name: x.double() for name, x in signals.items() if name not in everywhere}

    segments = Segments.whole(v.shape[0], v.shape[1]) if segments is None else segments
    means, variances, finals = {}, {}, []
    for n, (row, start, stop) in enumerate(segments.rows.tolist()):
        if belief is None:
            state = recursion.prior(k.new_zeros(k.shape[2:]), per_token["v"].new_zeros(v.shape[2:]))
        else:
            state = type(belief)(*(leaf[n].double() for leaf in belief))
        for t in range(start, stop):
            token = everywhere | {name: x[row, t] for name, x in per_token.items()}
            state = recursion.update(recursion.predict(state, token), token)
            means[row, t], variances[row, t] = recursion.read(state, token)
        finals.append(state)

    def lay_out(reads: dict[tuple[int, int], Tensor]) -> Tensor:
        nothing = v.new_zeros(v.shape[2:], dtype=torch.float64)
        tokens = [reads.get((b, t), nothing) for b in range(v.shape[0]) for t in range(v.shape[1])]
        return torch.stack(tokens).reshape(v.shape) if tokens else v.double()

    final = type(finals[0])(*(torch.stack(leaf) for leaf in zip(*finals, strict=True))) if finals else belief
    return Filtered(lay_out(means), lay_out(variances) if variance else None, final)
