"""A form of the op `attend` in linear time: precisions of channels as sums of two exponentials."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.ops._additive.api import additive
from kalmix.ops._attend.api import TIME_DTYPES, check_channels, check_dynamics
from kalmix.ops._attend.dynamics import Dynamics, rotate
from kalmix.ops._shared.validation import check_tokens
from kalmix.types import Filtered, belief_dtype
from kalmix.validation import check_dtype_and_device, check_range, check_shape


class SeparablePrecision(NamedTuple):
    """last + (first - last) exp(-rate lag): the precision of what is pulled forward, nearly (appendix B.3).

    It has the value and the slope of 1 / V at lag 0, and its limit; between, it is too low, by at most a share that
    grows with how far `first / last` is from 1 (docs/results/afa.md has it). The paper's l_r is
    last / first - 1; written so,
    nothing is singular where nothing decays.

    Attributes:
        first, last: the precision at once, and in the end.
        rate: per unit of time, >= 0.
    """

    first: Tensor
    last: Tensor
    rate: Tensor

    @classmethod
    def of(cls, dynamics: Dynamics) -> SeparablePrecision:
        """That of V = process_noise kappa + key_noise E^2 + query_noise; decays and noises broadcast."""
        decay = -2 * dynamics.log_decay
        growth = dynamics.process_noise + decay * dynamics.query_noise
        first = 1 / (dynamics.key_noise + dynamics.query_noise)
        last = torch.where(growth > 0, decay / torch.where(growth > 0, growth, 1.0), 0.0)
        return cls(first, last, growth * first)

    def after(self, lag: Tensor) -> Tensor:
        """The precision after a lag >= 0; all broadcast."""
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
    r"""The tensor form of Adaptive Filter Attention in linear time, where nothing is doubted (appendix B.3).

    With `SeparablePrecision`, P(tau), in the place of 1 / V, and all weights 1 (nu without end), both sums are those
    of linear attention with two decaying keys a channel, and the op `additive` has them:

        mean_i = sum_j P(t_i - t_j) e^{(-a + i w) (t_i - t_j)} v_j / sum_j P(t_i - t_j)

    Weights that depend on pairs of tokens are not separable: with them the paper's form has only its memory to gain,
    which `attend_channels` has as well, exactly.

    Args:
        v: `[B, T, H, 2 C]` what is seen of the state, C complex channels, the first C columns real parts.
        log_decay: `[H, C]`, -a, natural log per unit of time, <= 0.
        frequency: `[H, C]`, w, radians per unit of time.
        process_noise, key_noise, query_noise: `[H, C]`, as in `kalmix.ops.attend`.
        times: `[B, T]` when tokens were seen, not decreasing; one unit a token if absent.

    Returns:
        `Filtered` with mean `[B, T, H, 2 C]` in the dtype of `v`, as variance one over the sum of precisions, query
        noise included, `[B, T, H, 2 C]` in the dtype of a belief, and no belief.

    Raises:
        ArgumentError: a shape, dtype, device or value that is not as above, naming the argument.

    Complexity: O(T C) work and memory, in float64.
    """
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
    check_range("the steps of times", steps, minimum=0.0)

    # P is a difference of exponentials, and the gradient of a frequency one of sums, that may be 1e5 times as large.
    # float64 has the digits for that, if nothing is rounded between: so all numbers are widened once, here.
    dynamics = Dynamics(*(x.to(dtype) for x in dynamics))
    precision = SeparablePrecision.of(dynamics)
    query_terms = torch.stack([precision.last, precision.first - precision.last], -1).flatten(0, 1)  # [H C, 2]
    query_terms = query_terms.expand(*v.shape[:2], -1, -1)
    decay_terms = torch.stack([torch.zeros_like(precision.rate), -precision.rate], -1)
    step, ones = steps.to(dtype)[..., None, None, None], torch.ones_like(query_terms)

    def weighted_sum(observed: Tensor, log_decay: Tensor) -> Tensor:
        """The sum of what was `seen` `[B, T, H C, *]`, weighed by its precision, decayed by `log_decay` `[H, C, 2]`."""
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
