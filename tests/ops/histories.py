"""Random inputs of `attend` and its forms, and double loops over queries and keys as references."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import factorial
from typing import Any

import torch
from torch import Tensor

from kalmix.ops import Dynamics
from kalmix.types import Filtered

NAMES = Dynamics._fields
Signals = dict[str, Tensor]


def signals(
    length: int = 11,
    channels: int = 3,
    heads: int = 2,
    groups: int = 2,
    value_channels: int | None = None,
    per_channel: bool = False,
    seed: int = 0,
) -> Signals:
    """Draw float64 inputs with irregular times, two of them equal, and `groups` value heads per key head.

    With `value_channels`, values have that many channels and their own dynamics. With `per_channel`, decays and noises
    are `[H, C]`.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def dynamics(prefix: str, width: int) -> Signals:
        shape = (heads, width) if per_channel else (heads,)
        drawn = (-0.3 * normal(*shape).exp(), normal(heads, width), *(normal(*shape).exp() for _ in range(3)))
        return {prefix + name: x for name, x in zip(NAMES, drawn, strict=True)}

    x = {name: normal(2, length, heads, 2 * channels) for name in "qk"}
    x |= {"v": normal(2, length, heads * groups, 2 * (value_channels or channels))} | dynamics("", channels)
    if value_channels:
        x |= dynamics("value.", value_channels)
    x |= {
        "nu": 1 + normal(heads).exp(),
        "temperature": 0.6 + 0.3 * normal(heads).exp(),
        "floor": normal(heads).exp() / 9,
    }
    steps = normal(2, length).abs()
    steps[:, length // 2] = 0
    return x | {"times": steps.cumsum(1)}


def arguments(x: Signals) -> dict[str, Any]:
    """Return the inputs as arguments of an op."""
    inputs: dict[str, Any] = {name: y for name, y in x.items() if not name.startswith("value.")}
    if "value.log_decay" in x:
        inputs["value_dynamics"] = Dynamics(*(x[f"value.{name}"] for name in NAMES))
    return inputs


def slice_tokens(x: Signals, start: int, stop: int) -> Signals:
    """Return the inputs of some tokens."""
    return {name: y[:, start:stop] if y.ndim == 4 or name == "times" else y for name, y in x.items()}


def with_gradients(x: Signals) -> Signals:
    """Return copies that require gradients."""
    return x | {name: y.clone().requires_grad_() for name, y in x.items() if name != "times"}


def gradients(outputs: list[Tensor], inputs: Signals) -> list[Tensor]:
    """Compute the gradients of a random linear function of the outputs."""
    weights = [torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype) for y in outputs]
    return list(torch.autograd.grad(outputs, [y for y in inputs.values() if y.requires_grad], weights))


def mean_var(result: Filtered) -> list[Tensor]:
    """Return mean and variance."""
    assert result.variance is not None
    return [result.mean, result.variance]


def assert_close_to(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    """Check that tensors agree within a relative and absolute tolerance."""
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def to_complex(x: Tensor) -> Tensor:
    """Combine real and imaginary halves of the last dim."""
    return torch.complex(*x.chunk(2, -1))


def squared_abs(x: Tensor) -> Tensor:
    return x.real**2 + x.imag**2


def visible_keys(x: Signals, window: int | None, causal: bool) -> Iterator[tuple[int, int, int, list[int]]]:
    """Yield batch row, token and head of every query, and the tokens that it attends to."""
    batch, length, heads, _ = x["q"].shape
    for b, i, h in product(range(batch), range(length), range(heads)):
        in_window = (j for j in range(length) if abs(i - j) < (window or length))
        yield b, i, h, [j for j in in_window if j <= i or not causal]


def over_lag(lag: Tensor, rate: Tensor, frequency: Tensor, *noise: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return decay, rotation, and variance without and with query noise after a lag, which may be negative."""
    process, key, query = noise
    y, decay = 2 * rate * lag, (-rate * lag).exp()
    series = torch.stack([(-y) ** n / factorial(n + 1) for n in range(20)]).sum(0)  # (1 - e^-y) / y for small y
    small = y.abs() < 0.1
    accumulated = lag * torch.where(small, series, -torch.expm1(-y) / torch.where(small, 1.0, y))
    state = process * accumulated.abs() + key * decay**2
    return decay, torch.polar(torch.ones((), dtype=torch.float64), frequency * lag), state, state + query


def log_weights(ratio: Tensor, weight: str) -> Tensor:
    return -ratio.log1p() if weight == "rational" else -ratio


def double_loop(x: Signals, weight: str = "rational", window: int | None = None, causal: bool = True) -> list[Tensor]:
    """Compute `attend` or, if decays and noises are `[H, C]`, `attend_channels`, pair by pair."""
    groups, columns = x["v"].shape[2] // x["q"].shape[2], x["v"].shape[3] if x["log_decay"].ndim == 2 else 1
    means, variances = [], []
    for b, i, h, keys in visible_keys(x, window, causal):
        key_model, value_model = ([x.get(prefix + name, x[name])[h] for name in NAMES] for prefix in ("", "value."))
        scores, moved, precisions = [], [], []
        for j in keys:
            lag = x["times"][b, i] - x["times"][b, j]
            decay, rotation, _, variance = over_lag(lag, -key_model[0], *key_model[1:])
            residual = to_complex(x["q"][b, i, h]) - (decay + x["floor"][h]) * rotation * to_complex(x["k"][b, j, h])
            log_weight = log_weights((squared_abs(residual) / variance).sum() / x["nu"][h], weight)
            decay, rotation, state, variance = over_lag(lag, -value_model[0], *value_model[1:])
            scores.append(x["temperature"][h] * (log_weight - variance.log()))
            moved.append(decay * rotation * to_complex(x["v"][b, j, h * groups : (h + 1) * groups]))
            precisions.append(log_weight.exp() / state)
        attention = torch.stack(scores).softmax(0).reshape(len(keys), 1, -1)
        mean = (attention * torch.stack(moved)).sum(0)
        means.append(torch.cat([mean.real, mean.imag], -1))
        variance = 1 / torch.stack(precisions).sum(0).reshape(-1)
        variances.append(torch.cat([variance] * 2)[:columns].expand(groups, columns))
    return [torch.stack(rows).reshape(*x["v"].shape[:3], -1) for rows in (means, variances)]


def radial_loop(x: Signals, weight: str = "rational", window: int | None = None, causal: bool = True) -> list[Tensor]:
    """Compute `attend_radial`, pair by pair; noises, nu and temperature are `[H, 2]`."""
    means, variances = [], []
    for b, i, h, keys in visible_keys(x, window, causal):
        value = to_complex(x["v"][b, i, h])
        unit = value / squared_abs(value).sum().sqrt()
        scores, moved, precisions = [], [], []
        for j in keys:
            lag = x["times"][b, i] - x["times"][b, j]
            noise = (x[name][h] for name in NAMES[2:])
            decay, rotation, state, variance = over_lag(lag, -x["log_decay"][h], x["frequency"][h], *noise)
            residual = to_complex(x["q"][b, i, h]) - (decay + x["floor"][h]) * rotation * to_complex(x["k"][b, j, h])
            radial = (unit.conj() * residual).sum()
            parts = torch.stack([squared_abs(radial), squared_abs(residual - unit * radial).sum()])
            log_weight = log_weights(parts / variance / x["nu"][h], weight)
            scores.append(x["temperature"][h] * (log_weight - variance.log()))
            moved.append(decay * rotation * to_complex(x["v"][b, j, h]))
            precisions.append(log_weight.exp() / state)
        attention, moved = torch.stack(scores).softmax(0), torch.stack(moved)
        length = (attention[:, 0] * (unit.conj() * moved).sum(-1).real).sum()
        across = (attention[:, 1:] * moved).sum(0)
        across = across - unit * (unit.conj() * across).sum()
        mean = length * (value + across) / squared_abs(value + across).sum().sqrt()
        means.append(torch.cat([mean.real, mean.imag]))
        along, rest = (1 / torch.stack(precisions).sum(0)).unbind()
        variances.append((squared_abs(unit) * along + (1 - squared_abs(unit)) * rest).repeat(2))
    return [torch.stack(rows).reshape(x["v"].shape) for rows in (means, variances)]
