"""Linear dynamics of a head, and functions of the lag between two tokens: rotation and accumulated noise.

The functions and their derivatives have no singularity at decay rate 0. Equations: docs/ops/attend.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.errors import ArgumentError
from kalmix.validation import FLOATS, check_dtype_and_device, check_range, in_transform


class Dynamics(NamedTuple):
    """Linear stochastic model of H key heads with C complex channels: dz = (log_decay + i frequency) z dt + dw.

    Here z is the state of a channel and w its process noise, a Brownian motion. Pass an instance to `kalmix.ops.attend`
    as `value_dynamics` if values have another model than keys. The model of keys is passed as arguments of the op with
    the same names and shapes. For values, C is V / 2: columns j and j + V / 2 of a value are the real and imaginary
    part of channel j. H is the number of key heads, also for values.

    Fields are not checked here. `attend` raises `ArgumentError` for a wrong shape, dtype or device and, where values
    are checked (see `kalmix.checks`), for a number out of range, NaN and infinity. The dtype is that of q, k and v; if
    that is bfloat16 or float16, float32 is accepted, too. The unit of time is that of the op's `times`. A variance is
    that of one column (a real or an imaginary part); all columns of a head have the same.

    Attributes:
        log_decay: `[H]`, logarithm of the decay per unit of time, <= 0: over a lag t, z is multiplied by
            exp(log_decay t).
        frequency: `[H, C]`, angular frequency of each channel, of either sign, in radians per unit of time.
        process_noise: `[H]`, variance that diffusion adds per unit of time, >= 0.
        key_noise: `[H]`, variance of the observation noise of a key or value, >= 0; > 0 if `attend` returns a variance.
        query_noise: `[H]`, variance of the observation noise of a query, >= 0; `key_noise + query_noise` must be > 0.
            It has an effect in the model of values, too, through the variance V in `attend`.

    Example:
        >>> from kalmix.ops import Dynamics
        >>> heads, channels = 2, 8
        >>> one = torch.ones(heads)
        >>> model = Dynamics(-0.1 * one, torch.rand(heads, channels), 0.1 * one, one, one)
        >>> model.frequency.shape
        torch.Size([2, 8])
    """

    log_decay: Tensor
    frequency: Tensor
    process_noise: Tensor
    key_noise: Tensor
    query_noise: Tensor


class Weighting(NamedTuple):
    """Options of the weights and of the attention mask; see `kalmix.ops.attend`.

    Attributes:
        nu: `[H]`, residual (over its variance) at which a rational weight is 1/2.
        temperature: `[H]`, factor of the score.
        floor: `[H]`, constant added to the decay of keys.
        rational: use weights 1 / (1 + r / nu); otherwise exp(-r / nu).
        window: number of tokens that a query attends to, itself included; all if `None`.
        causal: mask later tokens.
    """

    nu: Tensor
    temperature: Tensor
    floor: Tensor
    rational: bool
    window: int | None
    causal: bool


def rotate(x: Tensor, times: Tensor, frequency: Tensor, *, forward: bool) -> Tensor:
    """Rotate complex channels by angle frequency * time, or back if not `forward`.

    Args:
        x: `[R, T, H, *, 2 C]`, C real parts, then C imaginary parts.
        times: float64 `[R, T]`.
        frequency: `[H, C]`.
        forward: sign of the angle.
    """
    heads, channels = frequency.shape
    frequency = frequency.double().view(heads, *(1,) * (x.ndim - 4), channels)
    angle = times.view(*times.shape, *(1,) * (x.ndim - 2)) * frequency
    cos, sin = angle.cos().to(x.dtype), (angle.sin() if forward else -angle.sin()).to(x.dtype)
    real, imaginary = x.chunk(2, -1)
    return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], -1)


def frequency_grad_carrier(frequency: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return zeros `[H, 1, 2 C]` that carry the gradient of frequencies, or `None` if no gradient is required.

    Tokens are rotated with detached frequencies. If x is a rotated token and y = carrier * lag, then
    x + y `times_i(x)` - y^2 x / 2 equals x and has its first and second derivatives with respect to frequency. This
    gradient is a sum of terms multiplied by lags. The gradient through `rotate` would be a difference of terms
    multiplied by times, which loses all digits if lags are much shorter than times.
    """
    zero = zero_with_grad(frequency)
    return None if zero is None else zero.to(dtype).repeat(1, 2)[:, None]


def zero_with_grad(x: Tensor) -> Tensor | None:
    """Return zeros that carry the derivatives of x, or `None` if no derivative is required."""
    return x - x.detach() if in_transform() or (torch.is_grad_enabled() and x.requires_grad) else None


def times_i(x: Tensor) -> Tensor:
    """Multiply complex channels `[..., 2 C]` by i."""
    real, imaginary = x.chunk(2, -1)
    return torch.cat([-imaginary, real], -1)


def kappa(rate: Tensor, lag: Tensor) -> Tensor:
    """Compute the variance that unit process noise adds over a lag: (1 - exp(-2 rate lag)) / (2 rate).

    At rate 0 it equals the lag. It is differentiable in `rate`, at 0 too. No gradient flows to `lag`: its `grad` stays
    `None`.

    Args:
        rate: tensor of any shape, decay rate per unit of time, >= 0, in float64, float32, bfloat16 or float16. A
            `log_decay` of the ops is the negative rate.
        lag: tensor of a shape that broadcasts with that of `rate`, time, >= 0, in one of these dtypes, int64 or int32.

    Returns:
        A tensor of the broadcast shape, in the dtype of `rate * lag`.

    Raises:
        ArgumentError: an argument is not a tensor, or has a shape, dtype, device or value other than described.

    Values, NaN and infinity included, are checked on CPUs, and on GPUs inside `kalmix.checks()`; never in compiled code
    or inside a transform of `torch.func`.

    Example:
        >>> from kalmix.ops import kappa
        >>> kappa(torch.tensor([0.0, 0.5]), torch.tensor(2.0))
        tensor([2.0000, 0.8647])
    """
    for name, x, dtypes in (("rate", rate, FLOATS), ("lag", lag, (*FLOATS, torch.int64, torch.int32))):
        if not isinstance(x, Tensor):
            raise ArgumentError(name, got=f"a {type(x).__name__}", expected="a tensor")
        check_dtype_and_device(name, x, dtypes, rate.device)
        check_range(name, x, minimum=0.0)
    if any(m != n and m != 1 and n != 1 for m, n in zip(rate.shape[::-1], lag.shape[::-1], strict=False)):
        shape = f"a shape that broadcasts with that of `rate`, {list(rate.shape)}"
        raise ArgumentError("lag", problem=f"has shape {list(lag.shape)}", expected=shape)
    return kappa_without_checks(rate, lag)


def kappa_without_checks(rate: Tensor, lag: Tensor) -> Tensor:
    """Compute `kappa` of valid arguments."""
    return (_Kappa if torch.compiler.is_compiling() else _KappaWithJvp).apply(rate, lag)


def accumulated_noise(rate: Tensor, lag: Tensor) -> Tensor:
    """Compute `kappa` without a derivative."""
    y = 2 * rate * lag
    return lag * torch.where(y > 0, -torch.expm1(-y) / torch.where(y > 0, y, 1.0), 1.0)


def accumulated_noise_slope(rate: Tensor, lag: Tensor) -> Tensor:
    """Compute the derivative of `kappa` with respect to the rate; it is -lag^2 at rate 0."""
    # Numbers of the module would be inputs of a graph with dynamic=True, and `_Kappa` could not be traced twice in it.
    limit = 0.5  # if y is smaller, the derivative is computed as a series
    terms = 14  # of that series: enough for float64
    y = 2 * rate * lag
    series, factorial = torch.zeros_like(y), 1.0
    small = y.clamp(max=limit)
    coefficients = []
    for n in range(1, terms + 1):  # coefficients of the derivative of (1 - e^-y) / y
        factorial *= n + 1
        coefficients.append((-1.0) ** n * n / factorial)
    for coefficient in reversed(coefficients):
        series = series * small + coefficient
    large = torch.where(y > limit, y, 1.0)
    return 2 * lag.square() * torch.where(y > limit, ((-large).exp() * (1 + large) - 1) / large.square(), series)


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
    """`_Kappa` with forward-mode derivatives; torch.compile in torch 2.11 cannot trace a custom `jvp`."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _Kappa.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, rate_tangent: Tensor, _: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        rate, lag = ctx.saved_tensors
        return rate_tangent * accumulated_noise_slope(rate, lag)
