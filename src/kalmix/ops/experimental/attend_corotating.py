"""Form of `attend` with a separate noise along one direction, given at each query."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kalmix.errors import ArgumentError
from kalmix.ops._attend.api import attend, check_channels, check_dynamics, make_weighting
from kalmix.ops._attend.dynamics import Dynamics
from kalmix.ops._shared.validation import check_tokens
from kalmix.types import Filtered, belief_dtype, replace_fields
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
    r"""Compute `kalmix.ops.attend` with noise that is isotropic plus rank one, along a direction given at each query.

    This is appendix B.7.1 of *Attention as an Adaptive Filter*. Let p_i be the direction of query token i, scaled to
    length 1. At query token i, the error with which a key token predicts the state has one variance along p_i and
    another across it. Its covariance is

        V_along p_i p_i^* + V_across (I - p_i p_i^*)

    where V_along and V_across are the variance V of `kalmix.ops.attend` with the noises along and across. So the
    components of the state along and across p_i are estimated separately:

        mean_i = p_i p_i^* along_i + (I - p_i p_i^*) across_i

    Here along_i and across_i are the means of two calls of `attend`. Both calls compare whole queries and keys,
    not their components along and across. They differ in the noises, `nu` and `temperature`.

    Tensors other than q, k, v, direction and `times` are in the dtype of `v` or of the belief (float32; float64 if `v`
    is).

    Args:
        q: `[B, T, H, 2 C]`, queries: C complex channels, first all real parts, then all imaginary parts; in float64,
            float32, bfloat16 or float16.
        k: `[B, T, H, 2 C]`, keys, in the dtype of `q`.
        v: `[B, T, G, 2 C]`, values, in the dtype of `q`. G must be a multiple of H; value head g uses key head
            g // (G / H).
        direction: `[B, T, G, 2 C]`, complex channels, in the dtype of `v`. Its length does not matter. Where it is 0,
            mean and variance are those across.
        log_decay: `[H]`, negative decay rate, natural logarithm per unit of time, <= 0.
        frequency: `[H, C]`, angular frequency in radians per unit of time.
        process_noise: `[H, 2]`, variance per unit of time along (first column) and across (second column), >= 0.
        key_noise: `[H, 2]`, observation variance along and across, >= 0; must be positive if `variance` is true.
        query_noise: `[H, 2]`, variance of the query along and across, >= 0. `key_noise + query_noise` must be positive.
        nu: scale of the squared residual r of `attend`, for both weights: 1 / (1 + r / nu) ("rational", 1/2 at r = nu)
            or exp(-r / nu) ("exponential"); > 0 and finite, a number or `[H, 2]` (along, across).
        temperature: factor of the logarithm in the softmax, > 0, a number or `[H, 2]` (along, across). Larger values
            sharpen the softmax.
        variance: also return the variance.
        options: `times`, `weight`, `window`, `floor`, `causal`, `belief`, `segments` and `kernel` of `attend`, in the
            same dtypes.

    Returns:
        `Filtered` with mean `[B, T, G, 2 C]` in the dtype of `v`; variance `[B, T, G, 2 C]` in the dtype of the belief,
        `None` unless `variance=True`; and the belief of `attend` (keys, values and times, the same for both calls),
        which you pass as `belief` to continue. Real and imaginary part of channel c have the
        variance |p_c|^2 along + (1 - |p_c|^2) across, where `along` and `across` are the variances of the two calls.

    Raises:
        ArgumentError: an argument has a shape, dtype, device or value other than described, or `value_dynamics` is
            given; the message names it.
        KernelError: the requested kernel is unknown or does not support the call.
        TypeError: `options` contains another name.

    Values, NaN and infinity included, are checked on CPUs, and on GPUs inside `kalmix.checks()`; never in compiled code
    or inside a transform of `torch.func`.

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
    check_channels(q, v, sizes)
    check_shape("v", v, "B T G K", sizes)
    if options.get("value_dynamics") is not None:
        raise ArgumentError("value_dynamics", got="given", expected="None: values have the dynamics of the keys")
    sizes["R"] = 2
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
        return replace_fields(across, mean=mean)
    along_share = (real.square() + imaginary.square()).repeat(1, 1, 1, 2)
    return replace_fields(
        across, mean=mean, variance=across.variance + along_share * (along.variance - across.variance)
    )
