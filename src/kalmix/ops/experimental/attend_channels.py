"""A form of the op `attend` with a decay and noises for every channel."""

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
    r"""The op `attend` with a decay and noises for every channel: the tensor form of Adaptive Filter Attention (3.1).

    The residual is one for all channels, the sum of theirs; what is averaged is weighed in each by its own variance:

        r_ij = sum_c |q_ic - (E_c + floor) e^{i w_c tau} k_jc|^2 / V_c,   weight = 1 / (1 + r / nu), or exp(-r / nu)
        A_ijc = softmax_j (temperature log(weight / V_c)),   mean_ic = sum_j A_ijc E_c e^{i w_c tau} v_jc
        variance_ic = 1 / sum_j weight / (V_c - query_noise_c)

    with E_c and V_c as in `attend`, which this is where all channels have the same.

    Args:
        q: `[B, T, H, 2 C]`, k: `[B, T, H, 2 C]` and v: `[B, T, G, 2 D]`, as `attend` takes them.
        log_decay, frequency, process_noise, key_noise, query_noise: `[H, C]`.
        value_dynamics: `Dynamics` of the values, each part `[H, D]`; those above if absent, and then D is C.
        nu, temperature, times, weight, window, floor, causal, belief, variance, segments: as `attend` takes them.

    Returns:
        `Filtered` as from `attend`, but for the variance, which is `[B, T, G, 2 D]`, real and imaginary parts alike.

    Raises:
        ArgumentError: a shape, dtype, device or value that is not as above, naming the argument.

    Complexity: O(T (S + T) (C + D)) exponentials after S tokens; memory O((S + T) (C + D)).
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
    if min(sizes.values()) == 0:
        return empty_output(v, belief, causal, v.shape[3] if variance else None)
    signals = AttendSignals(q, k, v, times, key_dynamics, value_dynamics, weighting)
    return kernel.attend_channels(signals, belief, segments, variance)
