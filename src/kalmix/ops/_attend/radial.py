"""Radial-tangential Adaptive Filter Attention: one noise along each token's direction, another across it."""

from __future__ import annotations

from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.errors import ArgumentError
from kalmix.ops._attend import radial_kernel as kernel
from kalmix.ops._attend.api import Weight, check_channels, check_dynamics, check_history, empty_output, make_weighting
from kalmix.ops._attend.dynamics import Dynamics
from kalmix.ops._attend.signals import AttendSignals
from kalmix.ops._shared.validation import check_tokens
from kalmix.segments import Segments
from kalmix.types import Filtered


def attend_radial(
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
    weight: Weight = "rational",
    window: int | None = None,
    floor: Tensor | float = 0.0,
    causal: bool = True,
    belief: HistoryBelief | None = None,
    variance: bool = False,
    segments: Segments | None = None,
) -> Filtered:
    r"""The op `attend` with one noise along the token's own direction and another across it (Algorithm 2).

    With u_i = v_i / |v_i| and what was pulled forward to t_i as in `attend`, the residual and the estimate fall into
    parts along u_i and across it, each with its V, weights and softmax A:

        r_along = |u_i^* (q_i - k_ij)|^2,   r_across = |q_i - k_ij|^2 - r_along
        m_i = sum_j A_along Re(u_i^* v_ij),   w_i = (I - u_i u_i^*) sum_j A_across v_ij
        mean_i = m_i (v_i + w_i) / |v_i + w_i|

    so magnitudes are averaged by themselves, and directions step across the sphere. The misprints of the paper's
    algorithm are set right: all is in one frame, keys decay also in their squares, and parts are taken at the query.

    Args:
        q, k, v: `[B, T, H, 2 C]`, as `attend` takes them; one value head a key head, of the same width.
        log_decay: `[H]`; frequency: `[H, C]`.
        process_noise, key_noise, query_noise: `[H, 2]`, along and across.
        nu, temperature: a number, or `[H, 2]`, along and across.
        times, weight, window, floor, causal, belief, variance, segments: as `attend` takes them.

    Returns:
        `Filtered` as from `attend`, but for the variance, `[B, T, H, 2 C]`: that of each channel, of which the part in
        the direction has the variance along it and the rest the one across, real and imaginary parts alike.

    Raises:
        ArgumentError: a shape, dtype, device or value that is not as above, naming the argument.

    Complexity: O(T (S + T) C) work after S tokens, memory O((S + T) C).
    """
    sizes, dynamics = (
        check_tokens(q, k, v, variance),
        Dynamics(log_decay, frequency, process_noise, key_noise, query_noise),
    )
    check_channels(q, v, sizes)
    if v.shape[2:] != k.shape[2:]:
        raise ArgumentError("v", got=list(v.shape), expected=f"as k, {list(k.shape)}")
    sizes["R"] = 2
    check_dynamics("", dynamics, ("H", "H C", "H R"), sizes, v, positive_key_noise=variance)
    weighting = make_weighting((nu, temperature, floor), weight, window, causal, ("H R", "H R", "H"), sizes, v)
    belief = check_history(belief, times, segments, causal, sizes, v)
    if min(sizes.values()) == 0:
        return empty_output(v, belief, causal, v.shape[3] if variance else None)
    signals = AttendSignals(q, k, v, times, dynamics, None, weighting)
    return kernel.attend_radial(signals, belief, segments, variance)
