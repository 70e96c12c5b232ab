"""Form of `attend` in linear time, with precisions approximated by sums of two exponentials."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.errors import ArgumentError
from kalmix.ops._additive.api import additive
from kalmix.ops._attend.api import check_channels, check_dynamics
from kalmix.ops._attend.dynamics import Dynamics, rotate
from kalmix.ops._shared.validation import check_tokens
from kalmix.types import Filtered, belief_dtype
from kalmix.validation import (
    FLOATS,
    TIME_DTYPES,
    can_check_values,
    check_dtype_and_device,
    check_range,
    check_shape,
    require,
)


class SeparablePrecision(NamedTuple):
    """Approximation last + (first - last) exp(-rate lag) of the precision 1 / V.

    V is the variance of the query minus the predicted key in `kalmix.ops.attend`.

    Exponentials of a lag are products of a factor of the query and one of the key, so `attend_separable` needs linear
    time (appendix B.3 of *Attention as an Adaptive Filter*). The approximation has the value and the slope of 1 / V at
    lag 0, and the same limit; at lags in between it is at most 1 / V, and docs/results/afa.md says by how much. If
    `process_noise` and `query_noise` are 0, `rate` and `last` are 0 and the approximation stays at `first`; 1 / V then
    grows without limit if there is decay.

    `SeparablePrecision.of(dynamics)` computes it from `kalmix.ops.Dynamics`, without the frequency. Its method
    `after(lag)` returns the precision after a lag >= 0, a number or a tensor that broadcasts with the fields. Fields
    are not checked here. `of` checks types, but no values: `key_noise + query_noise` must be positive.

    Attributes:
        first: precision at lag 0, 1 / (key_noise + query_noise), in any shape that broadcasts with the other fields;
            from `of`, the shape of the noises, such as `[H]` or `[H, C]`.
        last: limit for large lags if `rate` > 0; 0 without decay. If `rate` is 0, it has no effect, and `of`
            sets it to 0.
        rate: rate of the exponential per unit of time, >= 0.

    Raises:
        ArgumentError: the argument of `of` is not a `kalmix.ops.Dynamics` of tensors.

    Example:
        >>> from kalmix.ops import Dynamics
        >>> from kalmix.ops.experimental import SeparablePrecision
        >>> one = torch.ones(1)
        >>> SeparablePrecision.of(Dynamics(-one, one, one, one, one)).after(torch.zeros(1))
        tensor([0.5000])
    """

    first: Tensor
    last: Tensor
    rate: Tensor

    @classmethod
    def of(cls, dynamics: Dynamics) -> SeparablePrecision:
        """Approximate 1 / V for V = process_noise kappa + key_noise E^2 + query_noise; decays and noises broadcast.

        Raises:
            ArgumentError: `dynamics` is not a `kalmix.ops.Dynamics`, or one of its fields is not a tensor.
        """
        if not isinstance(dynamics, Dynamics):
            raise ArgumentError("dynamics", got=f"a {type(dynamics).__name__}", expected="kalmix.ops.Dynamics")
        for name, x in dynamics._asdict().items():
            require(isinstance(x, torch.Tensor), f"dynamics.{name}", f"a {type(x).__name__}", "a tensor")
        decay = -2 * dynamics.log_decay
        growth = dynamics.process_noise + decay * dynamics.query_noise
        first = 1 / (dynamics.key_noise + dynamics.query_noise)
        last = torch.where(growth > 0, decay / torch.where(growth > 0, growth, 1.0), 0.0)
        return cls(first, last, growth * first)

    def after(self, lag: Tensor) -> Tensor:
        """Return the precision after a lag >= 0; all tensors broadcast."""
        return self.last + (self.first - self.last) * torch.exp(-self.rate * lag)


def attend_separable(
    v: Tensor,
    *,
    log_decay: Tensor,
    frequency: Tensor,
    process_noise: Tensor,
    key_noise: Tensor,
    query_noise: Tensor,
    times: Tensor | None = None,
) -> Filtered:
    r"""Compute attention in linear time, in which the weight of a token depends on its age alone (appendix B.3).

    This is `kalmix.ops.experimental.attend_channels` without queries and keys: the factor that compares a query with a
    key is 1. The mean of each channel then weights past values by their precisions P, per channel:

        mean_i     = sum_j P(t_i - t_j) exp((log_decay + i frequency) (t_i - t_j)) v_j / sum_j P(t_i - t_j)
        variance_i = 1 / sum_j P(t_i - t_j)

    The sums run over token i and all tokens before it. P(tau) is `SeparablePrecision`, a sum of two exponentials. It
    approximates 1 / V(tau), where V is the variance of `kalmix.ops.attend`, query noise included. So each sum is linear
    attention with two decaying keys, which `kalmix.ops.additive` computes.

    Tensors other than v and times are in the dtype of `v` or in float32 (float64 if `v` is).

    Args:
        v: `[B, T, H, 2 C]`, values: C complex channels, first all real parts, then all imaginary parts; in float64,
            float32, bfloat16 or float16.
        log_decay: `[H, C]`, negative decay rate, natural logarithm per unit of time, <= 0.
        frequency: `[H, C]`, angular frequency in radians per unit of time.
        process_noise: `[H, C]`, variance per unit of time, >= 0.
        key_noise: `[H, C]`, observation variance, >= 0.
        query_noise: `[H, C]`, variance of the query, >= 0. `key_noise + query_noise` must be positive.
        times: `[B, T]`, time of each token, in float64, float32, int64 or int32, not decreasing. No gradient flows to
            them. Default: one unit per token.

    Returns:
        `Filtered` with mean `[B, T, H, 2 C]` in the dtype of `v`, variance `[B, T, H, 2 C]` in float32 (float64 if `v`
        is), the same for real and imaginary part, and `None` as belief. The variance is always returned.

    Raises:
        ArgumentError: an argument has a shape, dtype, device or value other than described; the message names it.

    Values, NaN and infinity included, are checked on CPUs, and on GPUs inside `kalmix.checks()`; never in compiled code
    or inside a transform of `torch.func`.

    Complexity: O(T H C) operations and memory, in float64.

    Example:
        >>> from kalmix.ops.experimental import attend_separable
        >>> one = torch.ones(4, 8)
        >>> v = torch.randn(2, 16, 4, 16)
        >>> attend_separable(
        ...     v, log_decay=-0.1 * one, frequency=one, process_noise=0.1 * one, key_noise=one, query_noise=one,
        ... ).mean.shape
        torch.Size([2, 16, 4, 16])
    """
    check_shape("v", v, "B T H C", {})  # before the checks of ops, which call their first argument q
    check_dtype_and_device("v", v, FLOATS, v.device)
    check_range("v", v)
    if v.shape[3] % 2:
        problem = f"has {v.shape[3]} columns"
        raise ArgumentError("v", problem=problem, expected="an even number (real parts, then imaginary parts)")
    sizes, dynamics = check_tokens(v, v, v), Dynamics(log_decay, frequency, process_noise, key_noise, query_noise)
    check_channels(v, v, sizes)
    check_dynamics("", dynamics, ("H C", "H C", "H C"), sizes, v, positive_key_noise=False)
    dtype, heads = torch.float64, sizes["H"]
    if times is None:
        times = torch.arange(sizes["T"], device=v.device, dtype=torch.float64).expand(sizes["B"], -1)
    check_shape("times", times, "B T", sizes)
    check_dtype_and_device("times", times, TIME_DTYPES, v.device)
    times = times.detach().double()
    if sizes["T"] > 0:
        times = times - times[:, :1]
    steps = times.diff(dim=1, prepend=times[:, :1])
    check_range("times", steps)
    if can_check_values(steps) and bool((steps < 0).any()):
        raise ArgumentError("times", problem="decreases", expected="non-decreasing times in each row")

    # P is a difference of exponentials, and the gradient of a frequency is a difference of sums that may be 1e5 times
    # larger. So all computations are in float64.
    dynamics = Dynamics(*(x.to(dtype) for x in dynamics))
    precision = SeparablePrecision.of(dynamics)
    query_terms = torch.stack([precision.last, precision.first - precision.last], -1).flatten(0, 1)  # [H C, 2]
    query_terms = query_terms.expand(*v.shape[:2], -1, -1)
    decay_terms = torch.stack([torch.zeros_like(precision.rate), -precision.rate], -1)
    step, ones = steps.to(dtype)[..., None, None, None], torch.ones_like(query_terms)

    def weighted_sum(observed: Tensor, log_decay: Tensor) -> Tensor:
        """Sum `observed` `[B, T, H C, *]` weighted by precision, with decays `log_decay` `[H, C, 2]`."""
        return additive(query_terms, ones, observed, log_decay=(log_decay * step).flatten(2, 3)).mean.unflatten(
            2, (heads, -1)
        )

    rotated_v = rotate(v.to(dtype), times, dynamics.frequency, forward=False)
    evidence = weighted_sum(
        rotated_v.unflatten(-1, (2, -1)).mT.flatten(2, 3), decay_terms + dynamics.log_decay[..., None]
    )
    total_precision = weighted_sum(ones[..., :1], decay_terms)  # [B, T, H, C, 1]; evidence is [B, T, H, C, 2]
    mean = rotate((evidence / total_precision).mT.flatten(3), times, dynamics.frequency, forward=True)
    variance = (1 / total_precision).expand_as(evidence).mT.flatten(3)
    return Filtered(mean.to(v.dtype), variance.to(belief_dtype(v.dtype)), None)
