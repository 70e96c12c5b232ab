"""The op `attend`, Adaptive Filter Attention: attention whose scores are likelihoods under linear dynamics."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.errors import ArgumentError, any_of
from kalmix.ops._attend.dynamics import Dynamics, Weighting
from kalmix.ops._attend.kernels import KERNELS
from kalmix.ops._attend.signals import AttendSignals
from kalmix.ops._shared.constants import filled
from kalmix.ops._shared.dispatch import checked_call, select_kernel
from kalmix.ops._shared.kernel import Kernel, KernelRequest
from kalmix.ops._shared.validation import check_belief, check_signal, check_tokens, empty_filtered
from kalmix.segments import Segments, check_segments, check_times
from kalmix.types import Filtered, belief_dtype
from kalmix.validation import (
    MAX_FLOAT,
    MAX_INT,
    can_check_values,
    check_bool,
    check_range,
)

Weight = Literal["rational", "exponential"]


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
    r"""Compute Adaptive Filter Attention: softmax attention with scores from a noisy linear model of the dynamics.

    This is the isotropic form (Algorithm 1 of *Attention as an Adaptive Filter*), with one decay rate and one set of
    noises per head. The model of a head is a complex state that decays, rotates and diffuses,
    dz = (-a + i w) z dt + dw, and each token is a noisy observation of it. For a query at time t_i and a key at time
    t_j, with lag tau = t_i - t_j, the op computes

        E_ij        = exp(-a tau)                                          decay
        kappa_ij    = (1 - E^2) / (2 a)                                    accumulated noise; tau if a = 0
        V_ij        = process_noise kappa + key_noise E^2 + query_noise    variance of the residual
        r_ij        = |q_i - (E + floor) exp(i w tau) k_j|^2 / V           squared residual over its variance
        weight_ij   = 1 / (1 + r / nu)  or  exp(-r / nu)                   "rational" or "exponential"
        A_ij        = softmax over j of temperature log(weight / V)
        mean_i      = sum_j A_ij E exp(i w tau) v_j
        variance_i  = 1 / sum_j (weight / (V - query_noise))

    So a key counts less if it is old (V is large) or if its prediction differs from the query (r is large). The sums
    run over the keys that the query can attend to: earlier tokens and itself, limited by `window`, and the tokens of
    `belief`.

    The average treats the errors of the predictions as independent. Without process noise they are. With temperature 1
    and `query_noise` 0, mean and variance then approach those of a Kalman filter with a flat prior as `nu` grows. With
    process noise the errors are correlated: the mean is not optimal and the variance is too small. The variance does
    not depend on `temperature`.

    In the shapes below, B is the batch size, T the number of tokens, H and G the numbers of key and value heads (H
    divides G), C and D the numbers of complex channels of keys and values, and S the number of slots of the belief.
    Complex numbers are stored as real columns: first all real parts, then all imaginary parts. Tensors other than q, k,
    v and `times` are in the dtype of `v` or of the belief.

    Args:
        q: `[B, T, H, 2 C]`, queries, in float64, float32, bfloat16 or float16. They are not scaled by 1 / sqrt(2 C).
        k: `[B, T, H, 2 C]`, keys, in the dtype of `q`.
        v: `[B, T, G, 2 D]`, values, in the dtype of `q`. Value head g uses key head g // (G / H). D must equal C unless
            `value_dynamics` is given.
        log_decay: `[H]`, the negative decay rate -a, natural logarithm per unit of time, <= 0. 0 means no decay.
        frequency: `[H, C]`, the angular frequency w of each channel, in radians per unit of time.
        process_noise: `[H]`, variance that diffusion adds per unit of time, >= 0.
        key_noise: `[H]`, variance of the observation noise of keys and values, >= 0. With `variance=True` it must be
            positive; with `value_dynamics` too, that of `value_dynamics` instead. Tested down to 1e-5; below that,
            float32 gradients of noises lose digits.
        query_noise: `[H]`, variance of the query, >= 0. `key_noise + query_noise` must be positive.
        nu: Scale of the residual, > 0 and finite, a number or `[H]`. "rational" weights are those of a Student t
            distribution: the smaller nu, the less an outlier counts. At r = nu the weight is 1/2. r is a sum over the
            C channels, so it grows with C.
        temperature: Factor of the logarithm in the softmax, > 0, a number or `[H]`. Larger values sharpen the softmax.
        times: `[B, T]`, time of each token, in float64, float32, int64 or int32, not decreasing within a sequence and
            not before the times of `belief`; equal times are allowed. Default: 0, 1, 2, ... in each sequence, or from
            the last time of the belief plus 1. No gradient flows to them, nor to the times of `belief`.
        value_dynamics: `kalmix.ops.Dynamics` of the values, with fields `[H]` and frequency `[H, D]`. They replace E,
            w and V in the mean, in the variance and in log(weight / V); r always uses the dynamics of the keys.
            Default: the dynamics of the keys.
        weight: "rational" or "exponential".
        window: Number of tokens that a query attends to: itself and the `window - 1` tokens before it. If not `causal`,
            also the `window - 1` tokens after it. Default: all.
        floor: Constant added to the factor E of keys in r, >= 0, a number or `[H]`.
        causal: Whether a query attends to earlier tokens and itself only. If false, lags may be negative: E then
            exceeds 1, and kappa is replaced by its absolute value; `belief` must be absent and none is returned. With a
            temperature below 1/2, tokens far in the future then dominate the mean, since E grows faster with their
            distance than their weights fall.
        belief: prior, the `HistoryBelief` of earlier tokens, such as the one returned by a previous call. Its first
            axis has N sequences: B, or the number of segments. Keys and values are in float32 (float64 if the inputs
            are). Default: no earlier tokens.
        variance: also return the variance.
        segments: `Segments` that assign tokens to sequences, for packing and padding. Default: each batch row is one
            sequence.
        kernel: "triton", "chunked" or "reference". Default: the fastest that supports the call.

    Returns:
        `Filtered` with mean `[B, T, G, 2 D]` in the dtype of `v`, variance `[B, T, G, 1]` in the dtype of the belief
        (one value for all columns; `None` unless `variance=True`), and the `HistoryBelief` of all tokens so far, or of
        the newest `window` of them, in float32 (float64 if the inputs are); `None` if not `causal`. Tokens outside
        every segment have mean and variance 0.

    Raises:
        ArgumentError: an argument has a shape, dtype, device or value other than described; the message names it.
        KernelError: the requested kernel is unknown or does not support the call.

    Every kernel supports gradients of first order. Only "reference" supports gradients of higher order, forward-mode
    derivatives and `torch.func.vmap`; the others raise `KernelError`, in the first backward pass if it has
    `create_graph=True`. "reference" is the default inside `torch.func`, in forward mode, and for very short sequences
    on a CPU. Pass `kernel="reference"` for gradients of higher order.

    Values, NaN and infinity included, are checked on CPUs, and on GPUs inside `kalmix.checks()`; never in compiled code
    or inside a transform of `torch.func`. Where they are not checked, a query's mean and variance are NaN, with
    gradient 0, if its own token or one that it attends to has NaN, infinity or an entry whose square overflows. Other
    queries are not affected.

    Complexity: O(T (S + T) (C + D)) operations, or O(T window (C + D)) with a window. Memory is O(S + T) with "triton"
    and "chunked", and O(T (S + T)) with "reference".

    Example:
        Attend over 16 tokens, then continue with one more, as in decoding:

        >>> from kalmix import ops
        >>> batch, tokens, heads, channels = 2, 16, 4, 8
        >>> q, k, v = torch.randn(3, batch, tokens + 1, heads, 2 * channels)
        >>> one = torch.ones(heads)
        >>> model = {
        ...     "log_decay": -0.1 * one, "frequency": torch.rand(heads, channels),
        ...     "process_noise": 0.1 * one, "key_noise": one, "query_noise": one,
        ... }
        >>> mean, variance, belief = ops.attend(q[:, :16], k[:, :16], v[:, :16], **model, variance=True)
        >>> mean.shape, variance.shape, belief.keys.shape
        (torch.Size([2, 16, 4, 16]), torch.Size([2, 16, 4, 1]), torch.Size([2, 16, 4, 16]))
        >>> step = ops.attend(q[:, 16:], k[:, 16:], v[:, 16:], **model, belief=belief)
        >>> whole = ops.attend(q, k, v, **model)
        >>> torch.allclose(step.mean, whole.mean[:, 16:], atol=1e-5)
        True
    """
    key_dynamics = Dynamics(log_decay, frequency, process_noise, key_noise, query_noise)
    signals, numbers = (q, k, v, times, key_dynamics, value_dynamics), (nu, temperature, floor)
    call = checked_call(_check, signals, belief, segments, (numbers, weight, window, causal), variance, kernel)
    if call.is_empty:
        return empty_output((*signals, numbers), call.belief, causal, 1 if variance else None)
    return call.kernel(AttendSignals(*signals, _weighting(call, numbers)), call.belief, segments, variance)


def checked_signals(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments | None, options: Mapping[str, Any]
) -> tuple[AttendSignals, bool]:
    """Check the arguments of `attend` and return its signals, and whether a variance is requested.

    Args:
        q, k, v: as in `attend`.
        segments: as in `attend`.
        options: its other arguments, without `belief`.

    Raises:
        ArgumentError: an argument has a shape, dtype, device or value other than described.
    """
    x = {name: parameter.default for name, parameter in signature(attend).parameters.items()} | dict(options)
    key_dynamics = Dynamics(*(x[name] for name in Dynamics._fields))
    signals, numbers = (q, k, v, x["times"], key_dynamics, x["value_dynamics"]), (x["nu"], x["temperature"], x["floor"])
    settings = numbers, x["weight"], x["window"], x["causal"]
    call = checked_call(_check, signals, None, segments, settings, x["variance"], x["kernel"])
    return AttendSignals(*signals, _weighting(call, numbers)), x["variance"]


def _weighting(call: Any, numbers: tuple[Tensor | float, ...]) -> Weighting:
    """Return the options of a checked call, with the numbers that are arguments of the call."""
    fields: list[Any] = [x if isinstance(x, Tensor) else y for x, y in zip(numbers, call.weighting, strict=False)]
    return Weighting(*fields, *call.weighting[3:])


class _CheckedCall(NamedTuple):
    """Call that is valid: see `CheckedCall`. Fields of `weighting` that are arguments of the call are `None`."""

    kernel: Kernel
    belief: Any
    is_empty: bool
    weighting: tuple[Any, ...]


def _check(
    signals: tuple[Any, ...],
    belief: HistoryBelief | None,
    segments: Segments | None,
    options: tuple[tuple[Tensor | float, Tensor | float, Tensor | float], Weight, int | None, bool],
    variance: bool,
    kernel: str | None,
) -> _CheckedCall:
    """Check the arguments of `attend`, and select a kernel."""
    (q, k, v, times, key_dynamics, value_dynamics), (numbers, weight, window, causal) = signals, options
    sizes = check_tokens(q, k, v, variance)
    check_channels(q, v, sizes)
    check_key_and_value_dynamics(key_dynamics, value_dynamics, ("H", "H C", "H"), sizes, v, positive_key_noise=variance)
    weighting = make_weighting(numbers, weight, window, causal, ("H", "H", "H"), sizes, v)
    belief = check_history(belief, times, segments, causal, sizes, v)
    request = KernelRequest(q.device.type, q.dtype, sizes["K"], sizes["V"], sizes["T"])
    selected = select_kernel("attend", KERNELS, request, kernel)
    own = (None if isinstance(x, Tensor) else y for x, y in zip(numbers, weighting, strict=False))
    return _CheckedCall(selected, belief, min(sizes.values()) == 0, (*own, *weighting[3:]))


def check_channels(q: Tensor, v: Tensor, sizes: dict[str, int]) -> None:
    """Check that keys and values have an even number of columns; add C and D, their numbers of channels, to `sizes`."""
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
    """Check the fields of a `Dynamics`.

    Args:
        prefix: put before the name of a field in messages.
        dynamics: the value to check.
        layouts: shapes of the decay, of the frequency and of the noises, one letter per dimension.
        sizes: sizes of the letters.
        like: tensor whose dtype and device the fields must match.
        positive_key_noise: whether `key_noise` must be positive.
    """
    if not isinstance(dynamics, Dynamics):
        raise ArgumentError(prefix.rstrip("."), got=f"a {type(dynamics).__name__}", expected="kalmix.ops.Dynamics")
    (decays, frequencies, noises), tiny = layouts, torch.finfo(torch.float32).tiny
    check_signal(f"{prefix}log_decay", dynamics.log_decay, (decays,), sizes, like, maximum=0.0)
    check_signal(f"{prefix}frequency", dynamics.frequency, (frequencies,), sizes, like)
    check_signal(f"{prefix}process_noise", dynamics.process_noise, (noises,), sizes, like, minimum=0.0)
    check_signal(
        f"{prefix}key_noise", dynamics.key_noise, (noises,), sizes, like, minimum=tiny if positive_key_noise else 0.0
    )
    check_signal(f"{prefix}query_noise", dynamics.query_noise, (noises,), sizes, like, minimum=0.0)
    if can_check_values(dynamics.key_noise):
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
    """Check the dynamics of keys and of values; without dynamics of values, C must equal D."""
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
        expected = f"kalmix.ops.Dynamics, because `v` has {sizes['V']} columns and `k` has {sizes['K']}"
        raise ArgumentError("value_dynamics", got=None, expected=expected)


def make_weighting(
    values: tuple[Tensor | float, Tensor | float, Tensor | float],
    weight: str,
    window: int | None,
    causal: bool,
    layouts: tuple[str, str, str],
    sizes: dict[str, int],
    like: Tensor,
) -> Weighting:
    """Check the options of the weights; expand nu, temperature and floor (`values`) to tensors of shapes `layouts`."""
    check_bool("causal", causal)
    if not isinstance(weight, str) or weight not in get_args(Weight):
        raise ArgumentError("weight", got=repr(weight), expected=any_of(get_args(Weight)))
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ArgumentError("window", got=repr(window), expected="a positive integer or None")

    def to_tensor(name: str, x: Tensor | float, layout: str, minimum_value: float) -> Tensor:
        if isinstance(x, Tensor):
            check_signal(name, x, (layout,), sizes, like, minimum=minimum_value)
            return x
        if isinstance(x, bool) or not isinstance(x, int | float) or not minimum_value <= x <= MAX_FLOAT:
            bound, shape = "above 0" if minimum_value else "of at least 0", ", ".join(layout.split())
            raise ArgumentError(name, got=repr(x), expected=f"a finite number {bound}, or a tensor [{shape}] of them")
        return filled(float(x), [sizes[letter] for letter in layout.split()], belief_dtype(like.dtype), like.device)

    minimum_value = (torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).tiny, 0.0)
    rows = zip(("nu", "temperature", "floor"), values, layouts, minimum_value, strict=True)
    nus, temperatures, floors = (to_tensor(*row) for row in rows)
    return Weighting(nus, temperatures, floors, weight == "rational", window and min(window, MAX_INT), causal)


def check_history(
    belief: HistoryBelief | None,
    times: Tensor | None,
    segments: Segments | None,
    causal: bool,
    sizes: dict[str, int],
    like: Tensor,
) -> HistoryBelief:
    """Check `belief` and `times`; return the belief, empty if absent. Adds N, the number of sequences, to `sizes`."""
    if not causal and belief is not None:
        raise ArgumentError("belief", got="given", expected="None if `causal` is False")
    sizes["N"] = check_segments(segments, sizes["B"], sizes["T"], like.device)
    belief = check_belief(belief, empty_belief(like, sizes), ("N S H K", "N S G V", "N S", "N S"), sizes)
    sizes.pop("S", None)  # 0 slots are allowed
    if times is not None:
        check_times(times, (belief.times, belief.positions), segments, sizes, like.device)
    return belief


def empty_belief(v: Tensor, sizes: dict[str, int]) -> HistoryBelief:
    """Return the belief before the first token: a history with 0 slots."""
    count, dtype = sizes["N"], belief_dtype(v.dtype)
    keys, values = (v.new_empty(count, 0, *(sizes[x] for x in layout), dtype=dtype) for layout in ("HK", "GV"))
    times, positions = (v.new_empty(count, 0, dtype=x) for x in (torch.float64, torch.int64))
    return HistoryBelief(keys, values, times, positions)


def empty_output(
    signals: tuple[Any, ...], belief: HistoryBelief, causal: bool, variance_columns: int | None
) -> Filtered:
    """Return the output of a call with an axis of size 0: see `empty_filtered`. Without `causal` it has no belief."""
    result = empty_filtered(signals, belief, variance_columns)
    return result if causal else Filtered(*result[:2], None)
