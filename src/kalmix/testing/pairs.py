"""Independent float64 formula of `attend`, pair by pair, written from the equations of its docstring."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kalmix.testing.recursions import Run, Tensors

DYNAMICS = ("log_decay", "frequency", "process_noise", "key_noise", "query_noise")


def attend_pairs(x: Tensors, options: dict[str, Any], runs: list[Run]) -> list[Tensor]:
    """Return mean, variance and, if causal, the history: keys, values, times and positions in compact slots."""
    mean, variance = torch.zeros_like(x["v"]), torch.zeros_like(x["v"][..., :1])
    histories = []
    for n, run in enumerate(runs):
        occupied = x["prior.positions"][n] >= 0 if "prior.positions" in x else torch.zeros(0, dtype=torch.bool)
        history, read, spread = _sequence(x, options, n, run, torch.nonzero(occupied)[:, 0], len(occupied))
        row, tokens = run[0], torch.arange(run[1], run[2])
        mean = mean.index_put((torch.tensor(row), tokens), read)
        variance = variance.index_put((torch.tensor(row), tokens), spread)
        histories.append(history)
    return [mean, variance, *_compact(histories, x)] if options.get("causal", True) else [mean, variance]


def _sequence(
    x: Tensors, options: dict[str, Any], n: int, run: Run, occupied: Tensor, slots: int
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Return the history after one sequence, and the mean and variance at its tokens."""
    row, start, stop = run
    now = slice(start, stop)
    count, past = stop - start, len(occupied)
    before = {name: x[f"prior.{name}"][n][occupied] for name in ("keys", "values", "times", "positions") if past}
    position = torch.arange(count) + (before["positions"][-1] + 1 if past else 0)
    first = before["times"][-1] + 1 if past else 0.0
    time = x["times"][row, now] if "times" in x else torch.arange(count, dtype=torch.float64) + first
    new = {"keys": x["k"][row, now], "values": x["v"][row, now], "times": time.double(), "positions": position}
    inputs = {name: torch.cat([before[name], new[name]]) if past else new[name] for name in new}

    lag = time.double()[:, None] - inputs["times"]  # [T, S]
    apart = position[:, None] - inputs["positions"]
    window = options.get("window") or 2**60
    visible = (apart < window) & (apart > -window)
    visible = (visible & (apart >= 0) if options.get("causal", True) else visible)[..., None]
    span = float(lag.abs().max()) if lag.numel() else 0.0
    lag = torch.where(visible[..., 0], lag, 0.0).to(x["v"].dtype)  # hidden pairs must not overflow
    positions = torch.cat([occupied, slots + torch.arange(start, stop)])
    rounded = (name for name in (*ROUNDED, QUERY_SHARE) if f"rounding.{name}" in x)
    ones = {name: x[f"rounding.{name}"][row, now][:, positions] for name in rounded}
    dynamics, values = _dynamics(x)
    query = _slipped(x["q"][row, now], dynamics["frequency"], x, "query_turns", row, now, span)
    score, known = _score(x, options, lag, ones, query, inputs["keys"])
    score = score.masked_fill(~visible, -torch.inf)
    shares = score.softmax(1)
    if "share" in ones:  # the terms of A (dA - sum A dA) round separately in the backward pass
        shares = shares + (ones["share"] - 1) * (score - score.logsumexp(1, keepdim=True).detach()).exp()
    if QUERY_SHARE in ones:
        turned = _score_of_turned(x, options, lag, ones, query, inputs["keys"], span).masked_fill(~visible, 0.0)
        shares = shares + (ones[QUERY_SHARE] - 1) * score.softmax(1).detach() * (turned - turned.detach())
    decay = _spread(values, lag, ones)[0]
    groups = inputs["values"].shape[1] // inputs["keys"].shape[1]
    predicted = _predicted(inputs["values"], values["frequency"], decay, lag, groups)
    mean = (shares.repeat_interleave(groups, 2)[..., None] * predicted).sum(1)
    precision = known.masked_fill(~visible, 0.0).sum(1).repeat_interleave(groups, 1)
    shortened = options.get("window") and x["v"].shape[1] > 0  # a call without tokens returns its belief
    cache = tuple(inputs[name][-window:] if shortened else inputs[name] for name in inputs)
    mean = torch.cat([mean.real, mean.imag], -1)
    mean = _slipped(mean, values["frequency"], x, "value_turns", row, now, span)
    return cache, mean, 1 / precision[..., None]


ROUNDED = ("square", "variance", "share")  # intermediate results that are rounded for every pair and key head
QUERY_SHARE = "query_share"  # like "share", in a kernel that sums gradients of queries separately


def _dynamics(x: Tensors) -> tuple[Tensors, Tensors]:
    """Return the dynamics of keys and of values, the same object if values have none of their own."""
    keys = {name: x[name] for name in DYNAMICS}
    has_value_dynamics = "value_dynamics.log_decay" in x
    return keys, {name: x[f"value_dynamics.{name}"] for name in DYNAMICS} if has_value_dynamics else keys


def _score_of_turned(
    x: Tensors, options: dict[str, Any], lag: Tensor, ones: Tensors, query: Tensor, key: Tensor, span: float
) -> Tensor:
    """Return scores whose only gradient is that of frequencies through queries that turn for the time `span`.

    Triton computes the frequencies' gradient as sum_i t_i <dq_i, -i q_i> + sum_j t_j <dk_j, -i k_j>, where dq and dk
    come from two kernels. Both contain the gradient of a score, A (dA - sum A dA), which each kernel rounds by itself.
    A gradient of a score that is off by e in both is off by e (t_i - t_j) in the sum, and in one kernel by e t_i.
    """
    slip = x["frequency"] - x["frequency"].detach()
    fixed = {name: y.detach() for name, y in x.items()}
    query, turn = query.detach(), span * slip.repeat(1, 2)
    real, imaginary = query.chunk(2, -1)
    return _score(fixed, options, lag, ones, query + turn * torch.cat([-imaginary, real], -1), key.detach())[0]


def _slipped(y: Tensor, frequency: Tensor, x: Tensors, name: str, row: int, now: slice, span: float) -> Tensor:
    """Return y with the rounding of a gradient of frequencies that is summed over times: eps times their span."""
    if f"rounding.{name}" not in x or not y.numel():
        return y
    slip = (frequency - frequency.detach()).repeat_interleave(y.shape[1] // frequency.shape[0], 0).repeat(1, 2)
    return y * (1 + (x[f"rounding.{name}"][row, now] - 1) * span * slip)


def _score(
    x: Tensors, options: dict[str, Any], lag: Tensor, ones: Tensors, query: Tensor, key: Tensor
) -> tuple[Tensor, Tensor]:
    """Return temperature log(weight / V) and weight / (V - query_noise), both `[T, S, H]`."""
    dynamics, values = _dynamics(x)

    def number(name: str, absent: float) -> Any:
        return x[name] if name in x else options.get(name, absent)

    decay, _, variance = _spread(dynamics, lag, ones)
    predicted = _predicted(key, dynamics["frequency"], decay + number("floor", 0.0), lag, 1)
    square = _square(torch.complex(*query.chunk(2, -1))[:, None] - predicted)
    if "square" in ones:  # a residual is a difference of squares and rounds like them
        size = query.square().sum(-1)[:, None] + _square(predicted)
        square = square + size * (ones["square"] - 1)
    square = square / number("nu", 1.0)
    _, certain, total = _spread(values, lag, ones)
    if values is dynamics and options.get("weight") != "exponential":  # V (1 + r / V), without cancellation
        log_share = -(variance + square).log()
        return number("temperature", 1.0) * log_share, log_share.exp() * (1 + values["query_noise"] / certain)
    ratio = square / variance
    log_weight = -ratio if options.get("weight") == "exponential" else -torch.log1p(ratio)
    return number("temperature", 1.0) * (log_weight - total.log()), log_weight.exp() / certain


def _square(x: Tensor) -> Tensor:
    return torch.view_as_real(x).square().sum((-2, -1))


def _spread(dynamics: Tensors, lag: Tensor, ones: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """Return E, V without the query noise, and V, `[T, S, H]`."""
    rate, lag = -dynamics["log_decay"], lag[..., None]
    distance = lag.abs()
    y = 2 * rate * distance
    near = y < 0.5
    exponent, small = torch.where(near, 1.0, y), torch.where(near, y, 0.0)
    series = torch.stack([(-small) ** n / math.factorial(n + 1) for n in range(17)]).sum(0)  # (1 - e^-y) / y
    forward = distance * torch.where(near, series, -torch.expm1(-exponent) / exponent)
    kappa = torch.where(lag >= 0, forward, forward * torch.where(lag >= 0, 0.0, y).exp())  # |1 - E^2| / 2a
    decay = (-rate * lag).exp()
    certain = (dynamics["process_noise"] * kappa + dynamics["key_noise"] * decay**2) * ones.get("variance", 1.0)
    return decay, certain, certain + dynamics["query_noise"]


def _predicted(x: Tensor, frequency: Tensor, decay: Tensor, lag: Tensor, groups: int) -> Tensor:
    """Return E e^{i w tau} x, complex `[T, S, G, C]`."""
    angle = lag[..., None, None] * frequency
    turn = (decay[..., None] * torch.complex(angle.cos(), angle.sin())).repeat_interleave(groups, 2)
    return turn * torch.complex(*x.chunk(2, -1))


def _compact(histories: list[tuple[Tensor, ...]], x: Tensors) -> list[Tensor]:
    """Lay histories side by side, each in the last slots; empty slots hold 0 and position -1."""
    longest = max((len(history[0]) for history in histories), default=0)
    if not histories:
        return [x["k"].new_zeros(0, 0, *x["k"].shape[2:]), x["v"].new_zeros(0, 0, *x["v"].shape[2:])] + [
            x["v"].new_zeros(0, 0)
        ] * 2
    laid = []
    for i in range(4):
        parts = []
        for history in histories:
            part = history[i]
            empty = part.new_full((longest - len(part), *part.shape[1:]), -1 if i == 3 else 0)
            parts.append(torch.cat([empty, part]))
        laid.append(torch.stack(parts))
    return laid
