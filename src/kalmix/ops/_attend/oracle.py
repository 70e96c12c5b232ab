"""The defining recursion of `attend`: what was seen, each token pulled forward by its lag.

Equations of section 3.6 of Attention as an Adaptive Filter. A belief is keys, values, times and positions of all tokens
seen.
"""

from __future__ import annotations

from math import factorial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kalmix.ops._shared.recursion import Recursion, State, Token

DYNAMICS = ("log_decay", "frequency", "process_noise", "key_noise", "query_noise")


def prior(k: Tensor, v: Tensor) -> State:
    nothing = k.new_zeros(0, dtype=torch.float64)
    return k.new_zeros(0, *k.shape), v.new_zeros(0, *v.shape), nothing, nothing.long()


def predict(belief: State, token: Token) -> State:
    """Nothing is predicted ahead of time; slots that hold nothing are dropped."""
    return tuple(leaf[belief[3] >= 0] for leaf in belief)


def update(belief: State, token: Token) -> State:
    _, _, times, positions = belief
    seen = len(times) > 0
    time = token["times"] if "times" in token else times[-1] + 1 if seen else times.new_zeros(())
    position = positions[-1] + 1 if seen else positions.new_zeros(())
    now = (token["k"], token["v"], time, position)
    longer = (torch.cat([leaf, x[None]]) for leaf, x in zip(belief, now, strict=True))
    window = token.get("window")
    return tuple(leaf if window is None else leaf[-window:] for leaf in longer)


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


def read(belief: State, token: Token) -> tuple[Tensor, Tensor]:
    """Weights, estimate and total precision of the tokens seen, the last of which asks."""
    seen_keys, seen_values, times, _ = belief
    keys = SimpleNamespace(**{name: token[name] for name in DYNAMICS})
    values = token.get("value_dynamics") or keys

    def number(name: str, absent: float) -> Any:
        x = token.get(name, absent)
        return x.double() if isinstance(x, Tensor) else x

    lag = times[-1] - times
    decay, _, variance = _spread(keys, lag)
    pulled = _pulled(seen_keys, keys.frequency, decay + number("floor", 0.0), lag)
    residual = torch.complex(*token["q"].chunk(2, -1)) - pulled
    square = torch.view_as_real(residual).square().sum((-2, -1)) / variance / number("nu", 1.0)
    log_weight = -square if token.get("weight") == "exponential" else -square.log1p()
    decay, certain, variance = _spread(values, lag)
    shares = (number("temperature", 1.0) * (log_weight - variance.log())).softmax(0)
    pulled = _pulled(seen_values, values.frequency, decay, lag)
    groups = token["v"].shape[0] // token["k"].shape[0]
    mean = (shares.repeat_interleave(groups, 1)[..., None] * pulled).sum(0)
    precision = (log_weight.exp() / certain).sum(0).repeat_interleave(groups)
    return torch.cat([mean.real, mean.imag], -1), 1 / precision[:, None]


RECURSION = Recursion(prior, predict, update, read, shares_keys=True, invariant=DYNAMICS)
