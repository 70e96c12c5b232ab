"""Parts around the step of `attend`: parameters of the heads before it, residual and prediction after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kalmix.layers.fused.derivatives import differentiate, register_gradients
from kalmix.layers.fused.dispatch import uses_triton
from kalmix.layers.fused.positive import positive
from kalmix.ops import Dynamics
from kalmix.ops._shared.custom_op import custom_op, needs_grad, with_launch_cache, without_dispatcher
from kalmix.validation import FLOAT32_STATE_DTYPES


class RawDynamics(NamedTuple):
    """Learned parameters of H heads with C channels, from which `StateDynamics` computes dynamics.

    Attributes:
        log_rate: `[H]`, logarithm of the rate; see `positive`.
        log_step: `[H]`, logarithm of the step.
        process_noise: `[H]`; the variance is step (softplus + its floor).
        key_noise: `[H]`; the variance is softplus + its floor.
        query_noise: `[H]`, likewise.
        frequency: `[H, P]`, P = C / 2 rounded up; the channels P, P + 1, ... have these frequencies with a minus sign.
    """

    log_rate: Tensor
    log_step: Tensor
    process_noise: Tensor
    key_noise: Tensor
    query_noise: Tensor
    frequency: Tensor


class RawWeights(NamedTuple):
    """Learned parameters of the weights of H heads, from which `RobustWeights` computes arguments; `[H]` each."""

    log_nu: Tensor
    log_temperature: Tensor
    floor: Tensor | None


def can_fuse_parameters(x: Tensor, parameters: Iterable[Tensor | None]) -> bool:
    """Return whether `step_parameters` accepts these parameters of a layer with tokens `x`.

    Otherwise, compute its results with PyTorch.
    """
    return (
        uses_triton("trajectory_step", x)
        and not torch.compiler.is_compiling()
        and all(y is None or _is_plain(y) for y in parameters)
    )


def _is_plain(parameter: Tensor) -> bool:
    """Return whether a parameter is no subclass of a tensor, such as a sharded one, and in a layout of the kernels."""
    plain = type(parameter) in (Tensor, nn.Parameter)
    return plain and parameter.dtype in FLOAT32_STATE_DTYPES and parameter.is_contiguous()


def can_fuse_step(x: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Return whether `predict_step` accepts tokens `x` and these parameters, without gradients."""
    return can_fuse_parameters(x, parameters) and not needs_grad(x, *parameters)


def step_parameters(
    dynamics: RawDynamics, weights: RawWeights | None, floors: tuple[float, float, float], channels: int
) -> tuple[Dynamics, dict[str, Tensor]]:
    """Compute the arguments of `attend` that depend on parameters only, in one kernel; differentiable.

    Args:
        dynamics: learned parameters of the dynamics.
        weights: learned parameters of the weights, or `None`.
        floors: floors of the variances of processes, keys and queries.
        channels: C.

    Returns:
        The dynamics, and the arguments `nu`, `temperature` and `floor`, or no arguments without `weights`.
    """
    results = _parameters(*dynamics, *(weights or (None,) * 3), *floors, channels)
    names = () if weights is None else ("nu", "temperature", "floor")
    arguments: dict[str, Tensor] = dict(zip(names, results[5:], strict=False))
    return Dynamics(*results[:5]), arguments


def predict_step(estimate: Tensor, v: Tensor, residual: Tensor, dynamics: Dynamics | None) -> Tensor:
    """Mix estimates with the tokens' own values, and predict the states one unit of time later, in one kernel.

        z = (1 - g) v + g estimate,   g = sigmoid(residual);   result e^{-a + i w} z

    Args:
        estimate: `[B, 1, H, 2 C]`.
        v: values in that shape.
        residual: `[H]`.
        dynamics: dynamics with the rates a and frequencies w; `None` returns z.

    Returns:
        The predicted state in the shape and dtype of `v`.
    """
    parameters = (None, None) if dynamics is None else (dynamics.log_decay, dynamics.frequency)
    return _predict(estimate, v, residual, *parameters)


def _eager(raw: Sequence[Tensor | None], floors: tuple[float, float, float], channels: int) -> tuple[Tensor, ...]:
    """Compute the results of the kernel with PyTorch."""
    log_rate, log_step, process, key, query, frequency, log_nu, log_temperature, floor = (
        None if x is None else x.float() for x in raw
    )
    assert log_rate is not None and log_step is not None and frequency is not None
    step = positive(log_step)
    variances = [F.softplus(x) + least for x, least in zip((process, key, query), floors, strict=True) if x is not None]
    turns = torch.cat([frequency, -frequency], -1)[:, :channels] * step[:, None]
    none = log_step.new_empty(0)
    nu, temperature = (none if x is None else positive(x) for x in (log_nu, log_temperature))
    least = none if log_nu is None else torch.zeros_like(log_nu) if floor is None else F.softplus(floor)
    return -positive(log_rate) * step, turns, variances[0] * step, *variances[1:], nu, temperature, least


def _forward_fake(
    log_rate, log_step, process_noise, key_noise, query_noise, frequency, log_nu, log_temperature, floor,
    process_floor, key_floor, query_floor, channels,
):  # fmt: skip
    heads = log_rate.shape[0]
    sizes = [heads, (heads, channels), *[heads] * 3, *[0 if log_nu is None else heads] * 3]
    return tuple(log_rate.new_empty(size, dtype=torch.float32) for size in sizes)


def _forward(
    log_rate: Tensor,
    log_step: Tensor,
    process_noise: Tensor,
    key_noise: Tensor,
    query_noise: Tensor,
    frequency: Tensor,
    log_nu: Tensor | None,
    log_temperature: Tensor | None,
    floor: Tensor | None,
    process_floor: float,
    key_floor: float,
    query_floor: float,
    channels: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from kalmix.layers.fused.triton.trajectory_step import parameters

    raw = (log_rate, log_step, process_noise, key_noise, query_noise, frequency, log_nu, log_temperature, floor)
    found = parameters(raw, (process_floor, key_floor, query_floor), channels)
    return found[0], found[1], found[2], found[3], found[4], found[5], found[6], found[7]


def _backward_fake(log_rate, others, grads, process_floor, channels):
    return [x.new_empty(0 if y is None else y.shape) for x, y in ((log_rate, y) for y in (log_rate, *others))]


def _backward(
    log_rate: Tensor,
    others: list[Tensor | None],
    grads: list[Tensor | None],
    process_floor: float,
    channels: int,
) -> list[Tensor]:
    from kalmix.layers.fused.triton.trajectory_step import parameters_backward

    return parameters_backward((log_rate, *others), grads, process_floor, channels)


_parameters_op = custom_op("kalmix::trajectory_parameters", with_launch_cache(_forward), _forward_fake)
_parameters_backward = without_dispatcher(
    custom_op("kalmix::trajectory_parameters_backward", with_launch_cache(_backward), _backward_fake)
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.floors, ctx.channels = inputs[9:12], inputs[12]


def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    log_rate, *others = ctx.saved_tensors
    found = _parameters_backward(log_rate, others, list(grads), ctx.floors[0], ctx.channels)
    return *(None if x is None else y for x, y in zip((log_rate, *others), found, strict=True)), *[None] * 4


def _differentiable_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    def function(*raw: Tensor | None) -> tuple[Tensor, ...]:
        return _eager(raw, ctx.floors, ctx.channels)

    return *differentiate(function, ctx.saved_tensors, grads), *[None] * 4


_parameters = register_gradients(_parameters_op, _setup, _gradients, _differentiable_gradients)


@with_launch_cache
def _predict(
    estimate: Tensor, v: Tensor, residual: Tensor, log_decay: Tensor | None, frequency: Tensor | None
) -> Tensor:
    from kalmix.layers.fused.triton.trajectory_step import predict

    return predict(estimate, v, residual, log_decay, frequency)
