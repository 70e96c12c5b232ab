"""A form of the op `attend` with a noise of its own along one direction, which moves with the state."""

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
    r"""The op `attend` under noise that is isotropic plus rank one and turns with the state (appendix B.7.1).

    Where p_i is a query's direction, of length 1, and the noises of all tokens have one variance along what it was
    then, e^{-i w tau} p_i, and another across it, what is pulled forward to the query has the covariance

        V_across I + (V_along - V_across) p_i p_i^*

    with each V as in `attend`. Its precision is of the same kind, so the two parts of a state are estimated apart:

        mean_i = p_i p_i^* along_i + (I - p_i p_i^*) across_i

    where along and across are what `attend` makes of either noise; a token's weight in each is that of its whole
    residual. `attend_radial` is for the state's own direction, in which it then steps across the sphere; this one
    takes any, and is linear in v but for the weights.

    Args:
        q, k, v: as `attend` takes them.
        direction: `[B, T, G, 2 C]`, p, complex pairs, of any length; where it is 0, all is across; same dtype as `v`.
        log_decay: `[H]`; frequency: `[H, C]`.
        process_noise, key_noise, query_noise: `[H, 2]`, along and across.
        nu, temperature: a number, or `[H, 2]`, along and across.
        variance: also return that of each channel.
        options: `times`, `belief` and what else `attend` takes, but `value_dynamics`.

    Returns:
        `Filtered` as from `attend`, but for the variance, `[B, T, G, 2 C]`: that of each channel, of which the part in
        the direction has the variance along it and the rest the one across, real and imaginary parts alike.

    Raises:
        ArgumentError: a shape, dtype, device or value that is not as above, naming the argument.

    Complexity: twice that of `attend`.
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
    parts = zip(*(x.unbind(-1) for x in (*noises, *weights)), strict=True)
    along, across = (attend(q, k, v, **dict(zip(names, part, strict=True)), **shared) for part in parts)

    dtype = belief_dtype(v.dtype)
    unit = normalize(direction.to(dtype), dim=-1)
    real, imaginary = unit.chunk(2, -1)
    difference, mean = along.mean.to(dtype) - across.mean.to(dtype), across.mean.to(dtype)
    for x in (unit, torch.cat([-imaginary, real], -1)):  # p and i p, as real vectors
        mean = mean + (x * difference).sum(-1, keepdim=True) * x
    mean = mean.to(v.dtype)
    if along.variance is None or across.variance is None:
        return across._replace(mean=mean)
    along_share = (real.square() + imaginary.square()).repeat(1, 1, 1, 2)
    return across._replace(mean=mean, variance=across.variance + along_share * (along.variance - across.variance))
