"""What is assumed of a state between two tokens: how far it decays and turns, and how unsure it gets.

Functions of the lag (docs/ops/attend.md), safe where there is no decay, and their derivatives.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.validation import in_transform

SERIES_LIMIT = 0.5  # below it, derivatives of kappa are summed as series
SERIES_TERMS = 14  # of them: exact to float64 there


class Dynamics(NamedTuple):
    """dz = (log_decay + i frequency) z dt + dw, seen through noise: one model a head.

    Attributes:
        log_decay: `[H]`, natural log per unit of time, <= 0.
        frequency: `[H, C]`, radians per unit of time, one a complex channel.
        process_noise: `[H]`, variance that diffusion adds per unit of time, >= 0.
        key_noise: `[H]`, variance of what is pulled forward when it was seen, >= 0.
        query_noise: `[H]`, variance of what it is compared with, >= 0; not both noises 0.
    """

    log_decay: Tensor
    frequency: Tensor
    process_noise: Tensor
    key_noise: Tensor
    query_noise: Tensor


class Weighting(NamedTuple):
    """How what is pulled forward is weighed.

    Attributes:
        nu: `[H]`, how many variances a residual may have before its token loses half its weight.
        temperature: `[H]`, what the score is multiplied by.
        floor: `[H]`, added to the decay of keys.
        rational: whether weights fall as 1 / (1 + r / nu), else as exp(-r / nu).
        window: how many tokens a query looks at, itself included; all if `None`.
        causal: whether it looks at no later ones.
    """

    nu: Tensor
    temperature: Tensor
    floor: Tensor
    rational: bool
    window: int | None
    causal: bool


def rotate(x: Tensor, times: Tensor, frequency: Tensor, *, forward: bool) -> Tensor:
    """Complex pairs `[L, T, H, *, 2 C]`, the first C real, turned as in `times` `[L, T]`, float64, or turned back."""
    heads, channels = frequency.shape
    frequency = frequency.double().view(heads, *(1,) * (x.ndim - 4), channels)
    angle = times.view(*times.shape, *(1,) * (x.ndim - 2)) * frequency
    cos, sin = angle.cos().to(x.dtype), (angle.sin() if forward else -angle.sin()).to(x.dtype)
    real, imaginary = x.chunk(2, -1)
    return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], -1)


def frequency_grad_carrier(frequency: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return 0 with the gradient of frequencies, `[H, 1, 2 C]`, or `None` if nothing asks for it.

    x + y `quarter(x)` - y^2 x / 2, with y = owed lag, is x, which has turned already, with its first and second
    derivatives. So written, the gradient is a sum of what lags multiply. Through `turned`, back from one time and
    forward to another, it would be the small difference of what times multiply, and drown in rounding where lags are
    short.
    """
    zero = zero_with_grad(frequency)
    return None if zero is None else zero.to(dtype).repeat(1, 2)[:, None]


def zero_with_grad(x: Tensor) -> Tensor | None:
    """Return 0 with the derivatives of x, or `None` if nothing asks for them."""
    return x - x.detach() if in_transform() or (torch.is_grad_enabled() and x.requires_grad) else None


def times_i(x: Tensor) -> Tensor:
    """Complex pairs `[..., 2 C]` times i."""
    real, imaginary = x.chunk(2, -1)
    return torch.cat([-imaginary, real], -1)


def kappa(rate: Tensor, lag: Tensor) -> Tensor:
    """What unit diffusion has grown to after a lag >= 0: (1 - exp(-2 rate lag)) / (2 rate), or the lag at rate 0."""
    return (_Kappa if torch.compiler.is_compiling() else _KappaWithJvp).apply(rate, lag)


def accumulated_noise(rate: Tensor, lag: Tensor) -> Tensor:
    """`kappa`, without its derivative."""
    y = 2 * rate * lag
    return lag * torch.where(y > 0, -torch.expm1(-y) / torch.where(y > 0, y, 1.0), 1.0)


def accumulated_noise_slope(rate: Tensor, lag: Tensor) -> Tensor:
    """The derivative of `kappa` for the rate, -lag^2 at rate 0."""
    y = 2 * rate * lag
    series, factorial = torch.zeros_like(y), 1.0
    small = y.clamp(max=SERIES_LIMIT)
    coefficients = []
    for n in range(1, SERIES_TERMS + 1):  # of the derivative of (1 - e^-y) / y
        factorial *= n + 1
        coefficients.append((-1.0) ** n * n / factorial)
    for coefficient in reversed(coefficients):
        series = series * small + coefficient
    large = torch.where(y > SERIES_LIMIT, y, 1.0)
    return 2 * lag.square() * torch.where(y > SERIES_LIMIT, ((-large).exp() * (1 + large) - 1) / large.square(), series)


class _Kappa(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(rate: Tensor, lag: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return accumulated_noise(rate, lag)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_kappa: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rate, lag = ctx.saved_tensors
        return (grad_kappa * accumulated_noise_slope(rate, lag)).sum_to_size(rate.shape), None


class _KappaWithJvp(_Kappa):
    """`_Kappa` with forward-mode derivatives, which the compiler of torch 2.11 refuses to trace."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _Kappa.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, rate_tangent: Tensor, _: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        rate, lag = ctx.saved_tensors
        return rate_tangent * accumulated_noise_slope(rate, lag)
