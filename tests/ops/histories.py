"""Random signals for `attend` and its forms, and the double loops that these are."""

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
    own: int | None = None,
    each: bool = False,
    seed: int = 0,
) -> Signals:
    """Irregular times, two of them equal, value heads in groups, float64.

    With `own`, values have dynamics of theirs, and this many channels; with `each`, every channel has dynamics.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def dynamics(prefix: str, width: int) -> Signals:
        shape = (heads, width) if each else (heads,)
        drawn = (-0.3 * normal(*shape).exp(), normal(heads, width), *(normal(*shape).exp() for _ in range(3)))
        return {prefix + name: x for name, x in zip(NAMES, drawn, strict=True)}

    x = {name: normal(2, length, heads, 2 * channels) for name in "qk"}
    x |= {"v": normal(2, length, heads * groups, 2 * (own or channels))} | dynamics("", channels)
    if own:
        x |= dynamics("value.", own)
    x |= {
        "nu": 1 + normal(heads).exp(),
        "temperature": 0.6 + 0.3 * normal(heads).exp(),
        "floor": normal(heads).exp() / 9,
    }
    steps = normal(2, length).abs()
    steps[:, length // 2] = 0
    return x | {"times": steps.cumsum(1)}


def arguments(x: Signals) -> dict[str, Any]:
    """The same, as an op takes them."""
    given: dict[str, Any] = {name: y for name, y in x.items() if not name.startswith("value.")}
    if "value.log_decay" in x:
        given["value_dynamics"] = Dynamics(*(x[f"value.{name}"] for name in NAMES))
    return given


def tokens(x: Signals, start: int, stop: int) -> Signals:
    """Those of some tokens."""
    return {name: y[:, start:stop] if y.ndim == 4 or name == "times" else y for name, y in x.items()}


def leaves(x: Signals) -> Signals:
    """The same, asking for gradients."""
    return x | {name: y.clone().requires_grad_() for name, y in x.items() if name != "times"}


def gradients(found: list[Tensor], given: Signals) -> list[Tensor]:
    """Of a random function of what was found."""
    weights = [torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype) for y in found]
    return list(torch.autograd.grad(found, [y for y in given.values() if y.requires_grad], weights))


def reads(found: Filtered) -> list[Tensor]:
    """Mean and variance."""
    assert found.variance is not None
    return [found.mean, found.variance]


def check_same(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def paired(x: Tensor) -> Tensor:
    """Complex numbers of pairs."""
    return torch.complex(*x.chunk(2, -1))


def square(x: Tensor) -> Tensor:
    return x.real**2 + x.imag**2


def queries(x: Signals, window: int | None, causal: bool) -> Iterator[tuple[int, int, int, list[int]]]:
    """Batch row, token and head of every query, and the tokens it sees."""
    batch, length, heads, _ = x["q"].shape
    for b, i, h in product(range(batch), range(length), range(heads)):
        near = (j for j in range(length) if abs(i - j) < (window or length))
        yield b, i, h, [j for j in near if j <= i or not causal]


def after(lag: Tensor, rate: Tensor, frequency: Tensor, *noise: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """After a lag, perhaps negative: decay, turn, and variance without and with the query noise."""
    process, key, query = noise
    y, decay = 2 * rate * lag, (-rate * lag).exp()
    series = torch.stack([(-y) ** n / factorial(n + 1) for n in range(20)]).sum(0)  # (1 - e^-y) / y, y small
    small = y.abs() < 0.1
    grown = lag * torch.where(small, series, -torch.expm1(-y) / torch.where(small, 1.0, y))
    certain = process * grown.abs() + key * decay**2
    return decay, torch.polar(torch.ones((), dtype=torch.float64), frequency * lag), certain, certain + query


def log_weight_of(ratio: Tensor, weight: str) -> Tensor:
    return -ratio.log1p() if weight == "rational" else -ratio


def double_loop(x: Signals, weight: str = "rational", window: int | None = None, causal: bool = True) -> list[Tensor]:
    """Mean and variance of `attend` or, if decays and noises are `[H, C]`, of `attend_channels`, pair by pair."""
    groups, columns = x["v"].shape[2] // x["q"].shape[2], x["v"].shape[3] if x["log_decay"].ndim == 2 else 1
    means, variances = [], []
    for b, i, h, seen in queries(x, window, causal):
        of_keys, of_values = ([x.get(prefix + name, x[name])[h] for name in NAMES] for prefix in ("", "value."))
        scores, pulled, precisions = [], [], []
        for j in seen:
            lag = x["times"][b, i] - x["times"][b, j]
            decay, turn, _, variance = after(lag, -of_keys[0], *of_keys[1:])
            residual = paired(x["q"][b, i, h]) - (decay + x["floor"][h]) * turn * paired(x["k"][b, j, h])
            log_weight = log_weight_of((square(residual) / variance).sum() / x["nu"][h], weight)
            decay, turn, certain, variance = after(lag, -of_values[0], *of_values[1:])
            scores.append(x["temperature"][h] * (log_weight - variance.log()))
            pulled.append(decay * turn * paired(x["v"][b, j, h * groups : (h + 1) * groups]))
            precisions.append(log_weight.exp() / certain)
        shares = torch.stack(scores).softmax(0).reshape(len(seen), 1, -1)
        mean = (shares * torch.stack(pulled)).sum(0)
        means.append(torch.cat([mean.real, mean.imag], -1))
        variance = 1 / torch.stack(precisions).sum(0).reshape(-1)
        variances.append(torch.cat([variance] * 2)[:columns].expand(groups, columns))
    return [torch.stack(found).reshape(*x["v"].shape[:3], -1) for found in (means, variances)]


def radial_loop(x: Signals, weight: str = "rational", window: int | None = None, causal: bool = True) -> list[Tensor]:
    """Mean and variance of `attend_radial`, pair by pair; noises, nu and temperature are `[H, 2]`."""
    means, variances = [], []
    for b, i, h, seen in queries(x, window, causal):
        value = paired(x["v"][b, i, h])
        unit = value / square(value).sum().sqrt()
        scores, pulled, precisions = [], [], []
        for j in seen:
            lag = x["times"][b, i] - x["times"][b, j]
            noise = (x[name][h] for name in NAMES[2:])
            decay, turn, certain, variance = after(lag, -x["log_decay"][h], x["frequency"][h], *noise)
            residual = paired(x["q"][b, i, h]) - (decay + x["floor"][h]) * turn * paired(x["k"][b, j, h])
            radial = (unit.conj() * residual).sum()
            parts = torch.stack([square(radial), square(residual - unit * radial).sum()])
            log_weight = log_weight_of(parts / variance / x["nu"][h], weight)
            scores.append(x["temperature"][h] * (log_weight - variance.log()))
            pulled.append(decay * turn * paired(x["v"][b, j, h]))
            precisions.append(log_weight.exp() / certain)
        shares, moved = torch.stack(scores).softmax(0), torch.stack(pulled)
        length = (shares[:, 0] * (unit.conj() * moved).sum(-1).real).sum()
        across = (shares[:, 1:] * moved).sum(0)
        across = across - unit * (unit.conj() * across).sum()
        mean = length * (value + across) / square(value + across).sum().sqrt()
        means.append(torch.cat([mean.real, mean.imag]))
        along, rest = (1 / torch.stack(precisions).sum(0)).unbind()
        variances.append((square(unit) * along + (1 - square(unit)) * rest).repeat(2))
    return [torch.stack(found).reshape(x["v"].shape) for found in (means, variances)]
