"""Form of `attend` with a separate noise along one direction that rotates with the state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kalmix.ops._attend.api import attend, check_dynamics, make_weighting
from kalmix.ops._attend.dynamics import Dynamics
from kalmix.ops._shared.validation import check_tokens
from kalmix.types import Filtered, belief_dtype
from kalmix.validation import check_dtype_and_device, check_range, check_shape


def attend_corotating(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    direction: Tensor,
    *,
    log_decay: Tensor,
    frequency: Tensor,
    process_noise: Tensor,
    key_noise: Tensor,
    query_noise: Tensor,
    nu: Tensor | float = 1.0,
    temperature: Tensor | float = 1.0,
    variance: bool = False,
    **options: Any,
) -> Filtered:
    r"""Compute `kalmix.ops.attend` with noise that is isotropic plus rank one and rotates with the state.

    This is appendix B.7.1 of *Attention as an Adaptive Filter*. Let p_i be the direction of token i, scaled to length
    1. Every past token j has one variance along the direction exp(-i w tau) p_i and another across it. Moved to time
    t_i, its error then has the covariance

        V_across I + (V_along - V_across) p_i p_i^*

    with each V as in `attend`. So the components along and across p_i are estimated separately:

        mean_i = p_i p_i^* along_i + (I - p_i p_i^*) across_i

    where `along` and `across` are the means of `attend` with the respective noises. The weight of a token in either
    depends on its whole residual. In `kalmix.ops.attend_radial` the direction is that of the value itself.

    Args:
        q: Queries, as in `attend`.
        k: Keys, as in `attend`.
        v: `[B, T, G, 2 C]`, values, as in `attend`.
        direction: `[B, T, G, 2 C]`, complex channels, of any length, in the dtype of `v`. Where it is 0, the mean is
            that of `across`.
        log_decay: `[H]`, negative decay rate, natural logarithm per unit of time, <= 0.
        frequency: `[H, C]`, angular frequency in radians per unit of time.
        process_noise: `[H, 2]`, variance per unit of time along and across the direction, >= 0.
        key_noise: `[H, 2]`, observation variance along and across, >= 0; must be positive if `variance` is true.
        query_noise: `[H, 2]`, variance of the query along and across, >= 0. `key_noise + query_noise` must be positive.
        nu: Scale of the residual, > 0, a number or `[H, 2]`.
        temperature: Factor of the logarithm in the softmax, > 0, a number or `[H, 2]`.
        variance: Whether to return the variance as well.
        options: Other arguments of `attend`, except `value_dynamics`.

    Returns:
        `Filtered` as from `attend`, but with a variance `[B, T, G, 2 C]`. The variance of channel c is |p_c|^2 times
        the variance along the direction plus 1 - |p_c|^2 times the one across.

    Raises:
        ArgumentError: A shape, dtype, device or value is not accepted. The message names the argument.

    Complexity: twice that of `attend`.

    Example:
        >>> from kalmix.ops.experimental import attend_corotating
        >>> batch, tokens, heads, channels = 2, 16, 4, 8
        >>> q, k, v = torch.randn(3, batch, tokens, heads, 2 * channels)
        >>> one = torch.ones(heads, 2)
        >>> attend_corotating(
        ...     q, k, v, torch.randn_like(v), log_decay=-0.1 * one[:, 0], frequency=torch.rand(heads, channels),
        ...     process_noise=0.1 * one, key_noise=one, query_noise=one,
        ... ).mean.shape
        torch.Size([2, 16, 4, 16])
    """
    sizes, noises = check_tokens(q, k, v, variance), (process_noise, key_noise, query_noise)
    check_shape("direction", direction, "B T G V", sizes)
    check_dtype_and_device("direction", direction, (v.dtype,), v.device)
    check_range("direction", direction)
    sizes["C"], sizes["R"] = v.shape[3] // 2, 2
    check_dynamics(
        "", Dynamics(log_decay, frequency, *noises), ("H", "H C", "H R"), sizes, v, positive_key_noise=variance
    )
    weights = make_weighting((nu, temperature, 0.0), "rational", None, True, ("H R", "H R", "H"), sizes, v)[:2]
    shared = {"log_decay": log_decay, "frequency": frequency, "variance": variance, **options}
    names = ("process_noise", "key_noise", "query_noise", "nu", "temperature")
    per_direction = zip(*(x.unbind(-1) for x in (*noises, *weights)), strict=True)
    along, across = (attend(q, k, v, **dict(zip(names, values, strict=True)), **shared) for values in per_direction)

    dtype = belief_dtype(v.dtype)
    unit = normalize(direction.to(dtype), dim=-1)
    real, imaginary = unit.chunk(2, -1)
    difference, mean = along.mean.to(dtype) - across.mean.to(dtype), across.mean.to(dtype)
    for x in (unit, torch.cat([-imaginary, real], -1)):  # p and i p as real vectors
        mean = mean + (x * difference).sum(-1, keepdim=True) * x
    mean = mean.to(v.dtype)
    if along.variance is None or across.variance is None:
        return across._replace(mean=mean)
    along_share = (real.square() + imaginary.square()).repeat(1, 1, 1, 2)
    return across._replace(mean=mean, variance=across.variance + along_share * (along.variance - across.variance))
