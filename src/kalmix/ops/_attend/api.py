"""The op `attend`: everything seen, pulled forward through linear dynamics and averaged (Adaptive Filter Attention)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.errors import ArgumentError
from kalmix.ops._attend.dynamics import Dynamics, Weighting
from kalmix.ops._attend.kernels import KERNELS
from kalmix.ops._attend.signals import AttendSignals
from kalmix.ops._shared.dispatch import select_kernel
from kalmix.ops._shared.kernel import KernelRequest
from kalmix.ops._shared.validation import check_belief, check_signal, check_tokens, clone_belief
from kalmix.segments import Segments, check_segments
from kalmix.types import Filtered, belief_dtype
from kalmix.validation import (
    MAX_FLOAT,
    MAX_INT,
    can_check_values,
    check_bool,
    check_dtype_and_device,
    check_range,
    check_shape,
)

Weight = Literal["rational", "exponential"]
TIME_DTYPES = (torch.float64, torch.float32, torch.int64, torch.int32)


def attend(
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
    kernel: str | None = None,
) -> Filtered:
    r"""Adaptive Filter Attention with one decay and one noise a head: the isotropic form, its Algorithm 1.

    Every token is a look at a complex state that decays, turns and diffuses, dz = (-a + i w) z dt + dw. For a query at
    t_i a token at t_j is pulled forward by the lag tau = t_i - t_j, and counts the less, the less sure that makes it
    and the less its key then looks like the query:

        E = exp(-a tau),   kappa = (1 - E^2) / (2 a),   V = process_noise kappa + key_noise E^2 + query_noise
        r = |q_i - (E + floor) e^{i w tau} k_j|^2 / V,   weight = 1 / (1 + r / nu), or exp(-r / nu)
        A_ij = softmax_j (temperature log(weight / V))
        mean_i = sum_j A_ij E e^{i w tau} v_j
        variance_i = 1 / sum_j weight / (process_noise kappa + key_noise E^2)

    What is pulled forward is averaged as if its errors were independent. That is so without process noise, where the
    answer is exact (a Kalman filter without prior, weights aside); with it they share the noise of the way, the mean is
    not the best one and the variance too small. The variance leaves the temperature out.

    Args:
        q: `[B, T, H, 2 C]` what tokens are compared with, C complex channels, the first C columns real parts, the last
            C imaginary. Not scaled.
        k: `[B, T, H, 2 C]` what is seen of the state, to be compared; same dtype as `q`.
        v: `[B, T, G, 2 D]` what is seen of the state, to be averaged; same dtype as `q`; value head g is averaged as
            key head g // (G / H) says. D is C unless values have dynamics of their own.
        log_decay: `[H]`, -a, natural log per unit of time, <= 0; 0 holds.
        frequency: `[H, C]`, w, radians per unit of time.
        process_noise: `[H]` variance that diffusion adds per unit of time, >= 0.
        key_noise: `[H]` variance of what is seen, >= 0; > 0 where a variance is asked for. Tested from 1e-5 on: below,
            float32 gradients of noises lose digits.
        query_noise: `[H]` variance of what it is compared with, >= 0; not both noises 0.
        nu: a number > 0, or one a head `[H]`.
        temperature: a number > 0, or one a head `[H]`.
        times: `[B, T]` when tokens were seen, float64, float32 or integers, not decreasing in a sequence, nor before
            the belief's; no gradient reaches them. One unit a token if absent, going on from the belief.
        value_dynamics: `Dynamics` of the values, by which E, w and V of what is averaged are meant; those above,
            which the residual r always has, if absent.
        weight: "rational" or "exponential".
        window: number of tokens a query sees, itself included: itself and the `window` - 1 before it. Where not
            `causal`, also the `window` - 1 after it. All if absent.
        floor: added to the decay of keys, >= 0, a number, or one a head `[H]`.
        causal: whether queries see no later tokens. If they do, lags may be negative, E more than 1 and kappa is taken
            without its sign; there is no belief then, neither before nor after. What is far ahead outweighs all else
            under a temperature below 1/2.
        belief: what was seen before; nothing if absent. N is B, or the number of segments.
        variance: also return the variance of the estimate.
        segments: which tokens form which sequence; each batch row one sequence if absent.
        kernel: a kernel's name; chosen by device and dtype if absent.

    Returns:
        `Filtered` with mean `[B, T, G, 2 D]` in the dtype of `v`, variance `[B, T, G, 1]` in the dtype of the belief
        (or `None`), and the `HistoryBelief` after the last token, float32 (float64 if the inputs are), of which a
        window keeps as many tokens as it shows; `None` where not causal.

    A token whose numbers are not finite, or whose square is not, makes the queries that see it read NaN; no gradient
    passes through what they read. Other queries do not change: where values are not checked (on GPUs, in compiled
    code), NaN in one sequence or in padding reaches no other sequence, nor earlier tokens of its own.

    Raises:
        ArgumentError: a shape, dtype, device or value that is not as above, naming the argument.
        KernelError: the pinned kernel cannot serve the call.

    Derivatives: every kernel has first derivatives by backward passes; "reference" also has second ones, forward mode
    and `vmap`, for which the others raise `KernelError` (docs/derivatives.md).

    Complexity: O(T (S + T) (C + D)) work after S tokens, or O(T window (C + D)); memory O(S + T) except in "reference".
    """
    sizes, key_dynamics = (
        check_tokens(q, k, v, variance),
        Dynamics(log_decay, frequency, process_noise, key_noise, query_noise),
    )
    check_channels(q, v, sizes)
    check_key_and_value_dynamics(key_dynamics, value_dynamics, ("H", "H C", "H"), sizes, v, positive_key_noise=variance)
    weighting = make_weighting((nu, temperature, floor), weight, window, causal, ("H", "H", "H"), sizes, v)
    belief = check_history(belief, times, segments, causal, sizes, v)
    request = KernelRequest(q.device.type, q.dtype, sizes["K"], sizes["V"], sizes["T"])
    chosen = select_kernel("attend", KERNELS, request, kernel)
    if min(sizes.values()) == 0:  # nothing to filter: every kernel may assume there is something
        return empty_output(v, belief, causal, 1 if variance else None)
    signals = AttendSignals(q, k, v, times, key_dynamics, value_dynamics, weighting)
    return chosen(signals, belief, segments, variance)


def check_channels(q: Tensor, v: Tensor, sizes: dict[str, int]) -> None:
    """Check that columns are pairs; binds C and D, how many there are of keys and of values."""
    for name, x, letter in (("q", q, "C"), ("v", v, "D")):
        sizes[letter] = x.shape[3] // 2
        if x.shape[3] % 2:
            raise ArgumentError(
                name, problem=f"has {x.shape[3]} columns", expected="an even number (real parts, then imaginary parts)"
            )


def check_dynamics(
    prefix: str,
    dynamics: Dynamics,
    layouts: tuple[str, ...],
    sizes: dict[str, int],
    like: Tensor,
    *,
    positive_key_noise: bool,
) -> None:
    """Check dynamics: layouts of decays, of frequencies and of noises; `sure` if what was seen may not be certain."""
    if not isinstance(dynamics, Dynamics):
        raise ArgumentError(prefix.rstrip("."), got=type(dynamics).__name__, expected="kalmix.ops.Dynamics")
    (decays, frequencies, noises), tiny = layouts, torch.finfo(torch.float32).tiny
    check_signal(f"{prefix}log_decay", dynamics.log_decay, (decays,), sizes, like, most=0.0)
    check_signal(f"{prefix}frequency", dynamics.frequency, (frequencies,), sizes, like)
    check_signal(f"{prefix}process_noise", dynamics.process_noise, (noises,), sizes, like, least=0.0)
    check_signal(
        f"{prefix}key_noise", dynamics.key_noise, (noises,), sizes, like, least=tiny if positive_key_noise else 0.0
    )
    check_signal(f"{prefix}query_noise", dynamics.query_noise, (noises,), sizes, like, least=0.0)
    check_range(f"{prefix}key_noise + query_noise", dynamics.key_noise + dynamics.query_noise, minimum=tiny)


def check_key_and_value_dynamics(
    keys: Dynamics,
    values: Dynamics | None,
    layouts: tuple[str, ...],
    sizes: dict[str, int],
    like: Tensor,
    *,
    positive_key_noise: bool,
) -> None:
    """Check the dynamics of keys and, where these differ or channels do, of values, whose D channels stand for C."""
    check_dynamics("", keys, layouts, sizes, like, positive_key_noise=positive_key_noise and values is None)
    if values is not None:
        check_dynamics(
            "value_dynamics.",
            values,
            tuple(x.replace("C", "D") for x in layouts),
            sizes,
            like,
            positive_key_noise=positive_key_noise,
        )
    elif sizes["C"] != sizes["D"]:
        expected = f"given, as values are {sizes['V']} wide, not {sizes['K']}"
        raise ArgumentError("value_dynamics", got="absent", expected=expected)


def make_weighting(
    values: tuple[Tensor | float, Tensor | float, Tensor | float],
    weight: str,
    window: int | None,
    causal: bool,
    layouts: tuple[str, str, str],
    sizes: dict[str, int],
    like: Tensor,
) -> Weighting:
    """Check how tokens are weighed; spread nu, temperature and floor out to their layouts if they are for all heads."""
    check_bool("causal", causal)
    if not isinstance(weight, str) or weight not in get_args(Weight):
        raise ArgumentError("weight", got=repr(weight), expected=" or ".join(map(repr, get_args(Weight))))
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ArgumentError("window", got=repr(window), expected="a positive integer")

    def checked(name: str, x: Tensor | float, layout: str, least: float) -> Tensor:
        if isinstance(x, Tensor):
            check_signal(name, x, (layout,), sizes, like, least=least)
            return x
        if isinstance(x, bool) or not isinstance(x, int | float) or not least <= x <= MAX_FLOAT:
            raise ArgumentError(name, got=repr(x), expected=f"a number of at least {least:g}, or a tensor of them")
        return like.new_full([sizes[letter] for letter in layout.split()], float(x), dtype=belief_dtype(like.dtype))

    least = (torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).tiny, 0.0)
    rows = zip(("nu", "temperature", "floor"), values, layouts, least, strict=True)
    nus, temperatures, floors = (checked(*row) for row in rows)
    return Weighting(nus, temperatures, floors, weight == "rational", window and min(window, MAX_INT), causal)


def check_history(
    belief: HistoryBelief | None,
    times: Tensor | None,
    segments: Segments | None,
    causal: bool,
    sizes: dict[str, int],
    like: Tensor,
) -> HistoryBelief:
    """The belief given, or nothing seen, checked with the times that go on from it; binds N."""
    if not causal and belief is not None:
        raise ArgumentError("belief", got="given", expected="absent where queries see what is to come")
    sizes["N"] = check_segments(segments, sizes["B"], sizes["T"], like.device)
    belief = check_belief(belief, empty_belief(like, sizes), ("N S H K", "N S G V", "N S", "N S"), sizes)
    sizes.pop("S", None)  # a history may be empty
    if times is not None:
        check_shape("times", times, "B T", sizes)
        check_dtype_and_device("times", times, TIME_DTYPES, like.device)
        check_range("times", times)
        if (
            can_check_values(times)
            and min(sizes.values()) > 0
            and _times_decrease(times.detach().double(), belief, segments)
        ):
            raise ArgumentError(
                "times", problem="decreases", expected="non-decreasing times in each sequence, belief included"
            )
    return belief


def _times_decrease(times: Tensor, belief: HistoryBelief, segments: Segments | None) -> bool:
    batch, length = times.shape
    segments = Segments.whole(batch, length, times.device) if segments is None else segments
    segment_ids = segments.segment_ids(batch, length)
    decreasing = (times.diff(dim=1) < 0) & (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] >= 0)
    nonempty = segments.rows[:, 2] > segments.rows[:, 1]
    row, start, _ = segments.rows[nonempty].long().unbind(1)
    before_belief = (belief.positions[nonempty] >= 0) & (belief.times[nonempty].detach() > times[row, start][:, None])
    return bool(decreasing.any()) or bool(before_belief.any())


def empty_belief(v: Tensor, sizes: dict[str, int]) -> HistoryBelief:
    """Nothing seen."""
    count, dtype = sizes["N"], belief_dtype(v.dtype)
    keys, values = (v.new_zeros(count, 0, *(sizes[x] for x in layout), dtype=dtype) for layout in ("HK", "GV"))
    no_times = v.new_zeros(count, 0, dtype=torch.float64)
    return HistoryBelief(keys, values, no_times, no_times.long())


def empty_output(v: Tensor, belief: HistoryBelief, causal: bool, variance_columns: int | None) -> Filtered:
    """The answer where there is no token; `columns` of the variance, if one is asked for."""
    output_variance = (
        None if variance_columns is None else v.new_zeros(*v.shape[:3], variance_columns, dtype=belief.keys.dtype)
    )
    return Filtered(torch.zeros_like(v), output_variance, clone_belief(belief) if causal else None)
