"""The oracle: the defining recursion of any design, sequence by sequence, token by token, in float64.

It is the specification that every kernel is held to, so it is written to be read, not to be fast: a filter is
three functions (predict, update, read), textbook formulas, and it imports no op. It is differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import factorial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kalmix.beliefs import DenseBelief, DiagonalBelief, HistoryBelief, PointBelief, RidgeBelief
from kalmix.designs import Design
from kalmix.ops._ridge.solvers import NOTHING, Adaptive
from kalmix.segments import Segments
from kalmix.types import Filtered

Token = dict[str, Any]
Store = Callable[[Any], Any]

_STORE: ContextVar[Store | None] = ContextVar("kalmix_oracle_store", default=None)


@contextmanager
def storing(store: Store) -> Iterator[None]:
    """Replace the belief after each token by `store(belief)`, which may round it as a smaller dtype does."""
    token = _STORE.set(store)
    try:
        yield
    finally:
        _STORE.reset(token)


class Recursion(NamedTuple):
    """A filter for one sequence: beliefs and signals here have neither a batch nor a time axis."""

    prior: Callable[..., Any]
    predict: Callable[..., Any]
    update: Callable[..., Any]
    read: Callable[..., tuple[Tensor, Tensor | None]]


# Cells: `[G, K, V]` independent Gaussians.


def _prior_cells(k: Tensor, v: Tensor) -> DiagonalBelief:
    shape = (*k.shape, v.shape[-1])
    return DiagonalBelief(k.new_zeros(shape), k.new_ones(shape))


def _predict_cells(belief: DiagonalBelief, token: Token) -> DiagonalBelief:
    """Equation 7 of Kalman Linear Attention: z ~ N(a z, p)."""
    decay = token["log_decay"].exp() if "log_decay" in token else 1.0
    noise = token.get("process_noise", 0.0)
    return DiagonalBelief(decay * belief.mean, decay**2 * belief.variance + noise)


def _update_cells(belief: DiagonalBelief, token: Token) -> DiagonalBelief:
    """Equation 9 by Table 5's gain P k / (k P k + 1/precision), written so that precision may be 0."""
    key, value, precision = token["k"][..., None], token["v"][..., None, :], token["precision"][..., None, :]
    gain = belief.variance * key * precision / (1 + key * belief.variance * key * precision)
    return DiagonalBelief(belief.mean + gain * (value - key * belief.mean), (1 - gain * key) * belief.variance)


def _read_cells(belief: DiagonalBelief, token: Token) -> tuple[Tensor, Tensor]:
    """Algorithm 1, lines 12 and 14."""
    query = token["q"][..., None]
    return (query * belief.mean).sum(-2), (query**2 * belief.variance).sum(-2)


# Memories: a matrix `[K, V]` a head, columns alike; equations of Memory by Design.


def _transition(token: Token) -> Tensor:
    """A, `[G, K, K]`."""
    if "matrix" in token:
        return token["matrix"]
    width = token["k"].shape[-1]
    if "angle" in token:  # appendix D: pairs (j, j + K / 2), observed rows first
        turn = torch.diag_embed(token["angle"].cos()), torch.diag_embed(token["angle"].sin())
        matrix = torch.cat([torch.cat([turn[0], -turn[1]], -1), torch.cat([turn[1], turn[0]], -1)], -2)
    else:
        matrix = torch.eye(width, dtype=torch.float64, device=token["k"].device).expand(len(token["k"]), width, width)
    if "log_decay" not in token:
        return matrix
    decay = token["log_decay"].exp()  # a head `[G]`, a key `[G, K]` or a pair `[G, K / 2]`
    decay = decay[:, None] if decay.ndim == 1 else decay
    return decay.repeat(1, width // decay.shape[1])[..., None] * matrix


def _diffusion(token: Token) -> Tensor | float:
    """l^2 D, `[G, K, K]`: every row diffuses or, of pairs, the observed ones."""
    if "process_noise" not in token:
        return 0.0
    rows = torch.ones_like(token["k"])
    if "angle" in token:
        rows[:, rows.shape[1] // 2 :] = 0
    return token["process_noise"][:, None, None] * torch.diag_embed(rows)


def _condition(mean: Tensor, covariance: Tensor, token: Token) -> DenseBelief:
    """Equations 10 to 13: the memory seen along the key."""
    key, value = token["k"][..., None], token["v"][..., None, :]
    warped = covariance @ key
    gain = warped / (token["obs_noise"][:, None, None] + key.mT @ warped)
    return DenseBelief(mean + gain @ (value - key.mT @ mean), covariance - gain @ warped.mT)


def _prior_memory(k: Tensor, v: Tensor) -> PointBelief:
    return PointBelief(k.new_zeros(*k.shape, v.shape[-1]))


def _predict_memory(belief: PointBelief, token: Token) -> PointBelief:
    return PointBelief(_transition(token) @ belief.mean)


def _update_reset(belief: PointBelief, token: Token) -> PointBelief:
    """Proposition 2: the predicted covariance is `reset`, times the identity or a diagonal, whatever it was."""
    reset = token["reset"] if token["reset"].ndim == 2 else token["reset"][:, None]
    covariance = torch.diag_embed(reset.expand_as(token["k"]))
    return PointBelief(_condition(belief.mean, covariance, token).mean)


def _update_input(belief: PointBelief, token: Token) -> PointBelief:
    """Equations 23 to 25: what the token writes is estimated from its value alone."""
    weight = token["write_variance"] / (token["write_variance"] + token["obs_noise"])
    return PointBelief(belief.mean + token["k"][..., None] * (weight[:, None] * token["v"])[..., None, :])


def _read_memory(belief: PointBelief | DenseBelief, token: Token) -> tuple[Tensor, None]:
    """Equation 8."""
    return (token["q"][..., None].mT @ belief.mean)[:, 0], None


def _prior_dense(k: Tensor, v: Tensor) -> DenseBelief:
    return DenseBelief(_prior_memory(k, v).mean, torch.diag_embed(torch.ones_like(k)))


def _predict_dense(belief: DenseBelief, token: Token) -> DenseBelief:
    """Equation 9."""
    move = _transition(token)
    return DenseBelief(move @ belief.mean, move @ belief.covariance @ move.mT + _diffusion(token))


def _update_dense(belief: DenseBelief, token: Token) -> DenseBelief:
    return _condition(*belief, token)


def _read_dense(belief: DenseBelief, token: Token) -> tuple[Tensor, Tensor]:
    """Equation 8, and the variance that all columns share: q'P q."""
    query = token["q"][..., None]
    return _read_memory(belief, token)[0], (query.mT @ belief.covariance @ query)[:, 0]


# Memories in information form: weighted sums over the past. Equations of Gated KalmaNet.


def _prior_ridge(k: Tensor, v: Tensor) -> RidgeBelief:
    return RidgeBelief(_prior_memory(k, v).mean, torch.diag_embed(torch.zeros_like(k)))


def _predict_ridge(belief: RidgeBelief, token: Token) -> RidgeBelief:
    share = token["log_decay"].exp()[:, None, None] if "log_decay" in token else 1.0
    return RidgeBelief(share * belief.cross, share * belief.gram)


def _update_ridge(belief: RidgeBelief, token: Token) -> RidgeBelief:
    key, value, noise = token["k"][..., None], token["v"][..., None, :], token["obs_noise"][:, None, None]
    return RidgeBelief(belief.cross + key @ value / noise, belief.gram + key @ key.mT / noise)


def _read_ridge(belief: RidgeBelief, token: Token) -> tuple[Tensor, Tensor]:
    """Equation 3, solved exactly whatever the solver, and 0 where an adaptive ridge has nothing to go by."""
    query, gram, ridge = token["q"], belief.gram, token.get("ridge", Adaptive())
    if isinstance(ridge, Adaptive):
        square = gram.square().sum((-2, -1))
        something = square > NOTHING**2
        norm = torch.where(something, square, 1.0).sqrt()
        level = torch.where(something, ridge.factor * norm, torch.inf)
    else:
        level = torch.full_like(query[:, 0], ridge.value)
    weight = torch.where(level < torch.inf, level, 1.0)[:, None, None]
    x = torch.linalg.solve(gram + weight * torch.eye(query.shape[1]).to(gram), query)
    x = torch.where((level < torch.inf)[:, None], x, 0.0)
    mixed = x if token.get("mix") is None else torch.lerp(query, x, token["mix"][:, None])
    return (mixed[:, None] @ belief.cross)[:, 0], (query * x).sum(-1, keepdim=True)


# Histories: what was seen, each token pulled forward by its lag. Section 3.6 of Attention as an Adaptive Filter.


def _prior_history(k: Tensor, v: Tensor) -> HistoryBelief:
    nothing = k.new_zeros(0, dtype=torch.float64)
    return HistoryBelief(k.new_zeros(0, *k.shape), v.new_zeros(0, *v.shape), nothing, nothing.long())


def _keep_history(belief: HistoryBelief, token: Token) -> HistoryBelief:
    """Nothing is predicted ahead of time; slots that hold nothing are dropped."""
    return HistoryBelief(*(leaf[belief.positions >= 0] for leaf in belief))


def _update_history(belief: HistoryBelief, token: Token) -> HistoryBelief:
    seen = len(belief.times) > 0
    time = token["times"] if "times" in token else belief.times[-1] + 1 if seen else belief.times.new_zeros(())
    position = belief.positions[-1] + 1 if seen else belief.positions.new_zeros(())
    now = (token["k"], token["v"], time, position)
    longer = (torch.cat([leaf, x[None]]) for leaf, x in zip(belief, now, strict=True))
    window = token.get("window")
    return HistoryBelief(*(leaf if window is None else leaf[-window:] for leaf in longer))


def _spread(dynamics: Any, lag: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """After each lag `[S]`: the decay, the variance of what was seen then, and that with the query noise, `[S, H]`."""
    rate, lag = -dynamics.log_decay.double(), lag[:, None]
    y = 2 * rate * lag
    series = torch.zeros_like(y)  # (1 - e^-y) / y, y small
    for n in reversed(range(16)):  # no power of y, whose second derivative is NaN at 0
        series = series * y + (-1.0) ** n / factorial(n + 1)
    far = torch.where(y > 0.5, y, 1.0)
    grown = lag * torch.where(y > 0.5, -torch.expm1(-far) / far, series)
    decay = (-rate * lag).exp()
    certain = dynamics.process_noise.double() * grown + dynamics.key_noise.double() * decay**2
    return decay, certain, certain + dynamics.query_noise.double()


def _pulled(x: Tensor, frequency: Tensor, decay: Tensor, lag: Tensor) -> Tensor:
    """e^{lambda lag} x of complex pairs `[S, G, 2 C]`, as complex numbers `[S, G, C]`."""
    turn = torch.polar(torch.ones((), dtype=torch.float64), lag[:, None, None] * frequency.double())
    turn = (decay[..., None] * turn).repeat_interleave(x.shape[1] // frequency.shape[0], 1)
    return turn * torch.complex(*x.chunk(2, -1))


def _read_history(belief: HistoryBelief, token: Token) -> tuple[Tensor, Tensor]:
    """Weights, estimate and total precision of the tokens seen, the last of which asks."""
    names = ("log_decay", "frequency", "process_noise", "key_noise", "query_noise")
    keys = SimpleNamespace(**{name: token[name] for name in names})
    values = token.get("value_dynamics") or keys

    def number(name: str, absent: float) -> Any:
        x = token.get(name, absent)
        return x.double() if isinstance(x, Tensor) else x

    lag = belief.times[-1] - belief.times
    decay, _, variance = _spread(keys, lag)
    pulled = _pulled(belief.keys, keys.frequency, decay + number("floor", 0.0), lag)
    residual = torch.complex(*token["q"].chunk(2, -1)) - pulled
    square = torch.view_as_real(residual).square().sum((-2, -1)) / variance / number("nu", 1.0)
    log_weight = -square if token.get("weight") == "exponential" else -square.log1p()
    decay, certain, variance = _spread(values, lag)
    shares = (number("temperature", 1.0) * (log_weight - variance.log())).softmax(0)
    pulled = _pulled(belief.values, values.frequency, decay, lag)
    groups = token["v"].shape[0] // token["k"].shape[0]
    mean = (shares.repeat_interleave(groups, 1)[..., None] * pulled).sum(0)
    precision = (log_weight.exp() / certain).sum(0).repeat_interleave(groups)
    return torch.cat([mean.real, mean.imag], -1), 1 / precision[:, None]


RECURSIONS = {
    "additive": Recursion(_prior_memory, _predict_memory, _update_input, _read_memory),
    "delta": Recursion(_prior_memory, _predict_memory, _update_reset, _read_memory),
    "diagonal": Recursion(_prior_cells, _predict_cells, _update_cells, _read_cells),
    "dense": Recursion(_prior_dense, _predict_dense, _update_dense, _read_dense),
    "ridge": Recursion(_prior_ridge, _predict_ridge, _update_ridge, _read_ridge),
    "attend": Recursion(_prior_history, _keep_history, _update_history, _read_history),
}


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
    recursion, told = RECURSIONS[design.op], {name: signals.pop(name) for name in design.options if name in signals}
    groups = v.shape[2] // k.shape[2]
    q, k = q.double(), k.double()
    if design.evidence.of != "state":  # of which value heads have none of their own
        q, k = (x.repeat_interleave(groups, dim=2) for x in (q, k))
    invariant = [name for name in design.transition.signals if design.evidence.of == "cell" and signals[name].ndim == 3]
    if design.evidence.of == "state":
        invariant = list(design.signals)
    everywhere = told | {name: signals[name].double() for name in invariant}
    per_token = {"q": q, "k": k, "v": v.double()}
    per_token |= {name: x.double() for name, x in signals.items() if name not in everywhere}

    segments = Segments.whole(v.shape[0], v.shape[1]) if segments is None else segments
    store = _STORE.get() or (lambda state: state)
    means, variances, finals = {}, {}, []
    for n, (row, start, stop) in enumerate(segments.rows.tolist()):
        if belief is None:
            state = recursion.prior(k.new_zeros(k.shape[2:]), per_token["v"].new_zeros(v.shape[2:]))
        else:
            state = type(belief)(*(leaf[n].double() if leaf.is_floating_point() else leaf[n] for leaf in belief))
        for t in range(start, stop):
            token = everywhere | {name: x[row, t] for name, x in per_token.items()}
            state = store(recursion.update(recursion.predict(state, token), token))
            means[row, t], variances[row, t] = recursion.read(state, token)
        finals.append(state)

    def lay_out(reads: dict[tuple[int, int], Any], width: int) -> Tensor:
        nothing = v.new_zeros(v.shape[2], width, dtype=torch.float64)
        tokens = [reads.get((b, t), nothing) for b in range(v.shape[0]) for t in range(v.shape[1])]
        return (torch.stack(tokens) if tokens else nothing[:0]).reshape(*v.shape[:3], width)

    final = type(finals[0])(*(_stacked(leaf) for leaf in zip(*finals, strict=True))) if finals else belief
    shared = design.covariance.kept in ("dense", "information", "lag")  # one variance serves all columns
    spread = lay_out(variances, 1 if shared else v.shape[3]) if variance else None
    return Filtered(lay_out(means, v.shape[3]), spread, final)


def _stacked(leaves: tuple[Tensor, ...]) -> Tensor:
    """One a sequence; of histories the shorter begin with slots that hold nothing."""
    longest = max(x.shape[0] for x in leaves)
    nothing = 0.0 if leaves[0].is_floating_point() else -1
    return torch.stack([pad(x, (0, 0) * (x.ndim - 1) + (longest - x.shape[0], 0), value=nothing) for x in leaves])
