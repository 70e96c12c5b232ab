"""Form of `attend` with a decay rate and noises for every channel."""

from __future__ import annotations

from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.ops._attend.api import (
    Weight,
    check_channels,
    check_history,
    check_key_and_value_dynamics,
    empty_output,
    make_weighting,
)
from kalmix.ops._attend.dynamics import Dynamics
from kalmix.ops._attend.signals import AttendSignals
from kalmix.ops._shared.validation import check_tokens
from kalmix.ops.experimental import attend_channels_kernel as kernel
from kalmix.segments import Segments
from kalmix.types import Filtered


def attend_channels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    frequency: Tensor,
    process_noise: Tensor,
    key_noise: Tensor,
    query_noise: Tensor,
    nu: Tensor | float = 1.0,
    temperature: Tensor | float = 1.0,
    times: Tensor | None = None,
    value_dynamics: Dynamics | None = None,
    weight: Weight = "rational",
    window: int | None = None,
    floor: Tensor | float = 0.0,
    causal: bool = True,
    belief: HistoryBelief | None = None,
    variance: bool = False,
    segments: Segments | None = None,
) -> Filtered:
    r"""Compute Adaptive Filter Attention with a decay rate and noises for every channel.

    This is the tensor form (section 3.1 of *Attention as an Adaptive Filter*). The residual is a sum over channels, and
    each channel has a softmax with its own variance:

        r_ij         = sum_c |q_ic - (E_c + floor) exp(i w_c tau) k_jc|^2 / V_c
        weight_ij    = 1 / (1 + r / nu)  or  exp(-r / nu)
        A_ijc        = softmax over j of temperature log(weight / V_c)
        mean_ic      = sum_j A_ijc E_c exp(i w_c tau) v_jc
        variance_ic  = 1 / sum_j (weight / (V_c - query_noise_c))

    with E_c, V_c and tau as in `kalmix.ops.attend`. If the channels of a head differ in frequency only, this is
    `attend`. Tensors other than q, k, v and `times` are in the dtype of `v` or of the belief.

    Args:
        q: `[B, T, H, 2 C]`, queries: C complex channels, first all real parts, then all imaginary parts. In float64,
            float32, bfloat16 or float16. They are not scaled.
        k: `[B, T, H, 2 C]`, keys, in the dtype of `q`.
        v: `[B, T, G, 2 D]`, values, in the dtype of `q`. G must be a multiple of H; value head g uses key head
            g // (G / H). D must equal C unless `value_dynamics` is given.
        log_decay: `[H, C]`, negative decay rate, natural logarithm per unit of time, <= 0.
        frequency: `[H, C]`, angular frequency in radians per unit of time.
        process_noise: `[H, C]`, variance per unit of time, >= 0.
        key_noise: `[H, C]`, observation variance, >= 0. If `variance` is true, it (that of `value_dynamics` if given)
            must be positive.
        query_noise: `[H, C]`, variance of the query, >= 0. `key_noise + query_noise` must be positive.
        nu: Scale of the residual, > 0 and finite, a number or `[H]`.
        temperature: Factor of the logarithm in the softmax, > 0, a number or `[H]`.
        times, weight, window, floor, causal, belief, segments: as in `kalmix.ops.attend`.
        value_dynamics: `kalmix.ops.Dynamics` of the values, each field `[H, D]`; their use is that in
            `kalmix.ops.attend`. Default: the dynamics of the keys.
        variance: also return the variance.

    Returns:
        `Filtered` with mean `[B, T, G, 2 D]` in the dtype of `v`, variance `[B, T, G, 2 D]` in the dtype of the belief,
        the same for real and imaginary part of a channel (`None` unless `variance=True`), and the `HistoryBelief` as
        from `kalmix.ops.attend` (`None` if not `causal`). Tokens outside every segment have mean and variance 0.

    Raises:
        ArgumentError: an argument has a shape, dtype, device or value other than described; the message names it.

    There is one implementation, of PyTorch operations, with derivatives of every order. Values are checked as in
    `kalmix.ops.attend`.

    Complexity: O(T (S + T) (C + D)) exponentials with S slots of the belief; memory O((S + T) (C + D)).

    Example:
        >>> from kalmix.ops.experimental import attend_channels
        >>> batch, tokens, heads, channels = 2, 16, 4, 8
        >>> q, k, v = torch.randn(3, batch, tokens, heads, 2 * channels)
        >>> one = torch.ones(heads, channels)
        >>> attend_channels(
        ...     q, k, v, log_decay=-0.1 * one, frequency=one, process_noise=0.1 * one, key_noise=one, query_noise=one,
        ... ).mean.shape
        torch.Size([2, 16, 4, 16])
    """
    sizes, key_dynamics = (
        check_tokens(q, k, v, variance),
        Dynamics(log_decay, frequency, process_noise, key_noise, query_noise),
    )
    check_channels(q, v, sizes)
    check_key_and_value_dynamics(
        key_dynamics, value_dynamics, ("H C", "H C", "H C"), sizes, v, positive_key_noise=variance
    )
    weighting = make_weighting((nu, temperature, floor), weight, window, causal, ("H", "H", "H"), sizes, v)
    belief = check_history(belief, times, segments, causal, sizes, v)
    signals = AttendSignals(q, k, v, times, key_dynamics, value_dynamics, weighting)
    if min(sizes.values()) == 0:
        return empty_output(signals, belief, causal, v.shape[3] if variance else None)
    return kernel.attend_channels(signals, belief, segments, variance)
