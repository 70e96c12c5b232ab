"""Defining recursion of `attend`: the belief stores all tokens, and reading propagates each to the present.

Equations of section 3.6 of *Attention as an Adaptive Filter*. A belief has keys, values, times and positions.
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
    """Return a belief without tokens."""
    no_times = k.new_zeros(0, dtype=torch.float64)
    return k.new_zeros(0, *k.shape), v.new_zeros(0, *v.shape), no_times, no_times.long()


def predict(belief: State, token: Token) -> State:
    """Drop empty slots; tokens are propagated when they are read."""
    return tuple(leaf[belief[3] >= 0] for leaf in belief)


def update(belief: State, token: Token) -> State:
    """Append the token, and keep the newest `window` tokens."""
    _, _, times, positions = belief
    has_history = len(times) > 0
    time = token["times"] if "times" in token else times[-1] + 1 if has_history else times.new_zeros(())
    position = positions[-1] + 1 if has_history else positions.new_zeros(())
    newest = (token["k"], token["v"], time, position)
    extended = (torch.cat([leaf, x[None]]) for leaf, x in zip(belief, newest, strict=True))
    window = token.get("window")
    return tuple(leaf if window is None else leaf[-window:] for leaf in extended)


def _variances(dynamics: Any, lag: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the decay, the variance of the state and the variance with query noise after lags `[S]`; each `[S, H]`."""
    rate, lag = -dynamics.log_decay.double(), lag[:, None]
    y = 2 * rate * lag
    series = torch.zeros_like(y)  # of (1 - e^-y) / y for small y
    for n in reversed(range(16)):  # Horner: the second derivative of a power is NaN at 0
        series = series * y + (-1.0) ** n / factorial(n + 1)
    large = torch.where(y > 0.5, y, 1.0)
    accumulated = lag * torch.where(y > 0.5, -torch.expm1(-large) / large, series)
    decay = (-rate * lag).exp()
    state = dynamics.process_noise.double() * accumulated + dynamics.key_noise.double() * decay**2
    return decay, state, state + dynamics.query_noise.double()


def _propagate(x: Tensor, frequency: Tensor, decay: Tensor, lag: Tensor) -> Tensor:
    """Return decay * exp(i frequency lag) x as complex numbers `[S, G, C]`, for x `[S, G, 2 C]`."""
    rotation = torch.polar(torch.ones((), dtype=torch.float64), lag[:, None, None] * frequency.double())
    rotation = (decay[..., None] * rotation).repeat_interleave(x.shape[1] // frequency.shape[0], 1)
    return rotation * torch.complex(*x.chunk(2, -1))


def read(belief: State, token: Token) -> tuple[Tensor, Tensor]:
    """Compute mean and variance for the query of the last token."""
    past_keys, past_values, times, _ = belief
    no_diffusion = {"process_noise": torch.zeros_like(token["key_noise"])}
    keys = SimpleNamespace(**no_diffusion | {name: token[name] for name in DYNAMICS if name in token})
    values = token.get("value_dynamics") or keys

    def number(name: str, default: float) -> Any:
        x = token.get(name, default)
        return x.double() if isinstance(x, Tensor) else x

    lag = times[-1] - times
    decay, _, variance = _variances(keys, lag)
    predicted = _propagate(past_keys, keys.frequency, decay + number("floor", 0.0), lag)
    residual = torch.complex(*token["q"].chunk(2, -1)) - predicted
    square = torch.view_as_real(residual).square().sum((-2, -1)) / variance / number("nu", 1.0)
    log_weight = -square if token.get("weight") == "exponential" else -square.log1p()
    decay, state, variance = _variances(values, lag)
    attention = (number("temperature", 1.0) * (log_weight - variance.log())).softmax(0)
    predicted = _propagate(past_values, values.frequency, decay, lag)
    groups = token["v"].shape[0] // token["k"].shape[0]
    mean = (attention.repeat_interleave(groups, 1)[..., None] * predicted).sum(0)
    precision = (log_weight.exp() / state).sum(0).repeat_interleave(groups)
    return torch.cat([mean.real, mean.imag], -1), 1 / precision[:, None]


RECURSION = Recursion(prior, predict, update, read, shares_keys=True, invariant=DYNAMICS)
