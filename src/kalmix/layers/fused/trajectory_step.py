"""Parts around the step of `attend`: parameters of the heads before it, residual and prediction after it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.layers.fused.dispatch import uses_triton
from kalmix.ops import Dynamics
from kalmix.ops._shared.custom_op import needs_grad, with_launch_cache
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


def can_fuse_step(x: Tensor, parameters: Iterable[Tensor | None]) -> bool:
    """Return whether the functions of this module accept tokens `x` and these parameters: no gradients, no float64.

    Otherwise, compute their results with PyTorch.
    """
    given = [parameter for parameter in parameters if parameter is not None]
    return (
        uses_triton("trajectory_step", x)
        and not torch.compiler.is_compiling()
        and all(parameter.dtype in FLOAT32_STATE_DTYPES and parameter.is_contiguous() for parameter in given)
        and not needs_grad(x, *given)
    )


def step_parameters(
    dynamics: RawDynamics, weights: RawWeights | None, floors: tuple[float, float, float], channels: int
) -> tuple[Dynamics, dict[str, Tensor]]:
    """Compute the arguments of `attend` that depend on parameters only, in one kernel.

    Args:
        dynamics: learned parameters of the dynamics.
        weights: learned parameters of the weights, or `None`.
        floors: floors of the variances of processes, keys and queries.
        channels: C.

    Returns:
        The dynamics, and the arguments `nu`, `temperature` and `floor`, or no arguments without `weights`.
    """
    heads = dynamics.log_rate.shape[0]
    result: Tensor = _parameters(*dynamics, *(weights or (None,) * 3), *floors, channels)
    log_decay, process, key, query, nu, temperature, floor = result[: 7 * heads].view(7, heads).unbind(0)
    frequency = result[7 * heads :].view(heads, channels)
    arguments = {} if weights is None else {"nu": nu, "temperature": temperature, "floor": floor}
    return Dynamics(log_decay, frequency, process, key, query), arguments


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


@with_launch_cache
def _parameters(*arguments: Tensor | float | None) -> Tensor:
    from kalmix.layers.fused.triton.trajectory_step import parameters

    return parameters(arguments)


@with_launch_cache
def _predict(
    estimate: Tensor, v: Tensor, residual: Tensor, log_decay: Tensor | None, frequency: Tensor | None
) -> Tensor:
    from kalmix.layers.fused.triton.trajectory_step import predict

    return predict(estimate, v, residual, log_decay, frequency)
