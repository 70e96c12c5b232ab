"""`kalmix.filter`: convert the signals of a design to the arguments of its op, and call the op."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kalmix.designs import Design
from kalmix.designs.spec import check_design
from kalmix.designs.validation import check_shared_signals
from kalmix.errors import ArgumentError, DesignError
from kalmix.ops import OPS
from kalmix.ops._shared.lowering import Signals
from kalmix.ops._shared.validation import check_heads
from kalmix.types import Filtered
from kalmix.validation import check_shape


def filter(  # noqa: A001 - the public name
    design: Design,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    belief: Any = None,
    variance: bool = False,
    segments: Any = None,
    kernel: str | None = None,
    **signals: Any,
) -> Filtered:
    """Filter sequences under a design.

    The design determines the op (`design.op`); its signals are converted to the arguments of that op, for example noise
    variances to gains (Table 1 of Memory by Design).

    For covariances "diagonal" and "dense" mean and variance are those of the exact posterior, up to rounding. For
    "reset" (mean only) and "lag" they are the approximation that `kalmix.designs.Covariance` describes. For
    "information" they are those of a ridge regression, up to the error of the solver. For "none" there is a mean only.

    `design.signals` and `design.optional` list the names of the signals; most designs have two to four of these:

        obs_noise       [B, T, G]                   > 0   variance of the noise of a value
        process_noise   [B, T, G]                  >= 0   variance that is added at each token
        log_decay       [B, T, G] or [B, T, G, K]  <= 0   logarithm of the decay per token; K for decay "key" only
        reset           [B, T, G] or [B, T, G, K]   > 0   variance before the token, in place of the predicted one
        write_variance  [B, T, G]                   > 0   prior variance of a written value
        precision       [B, T, G, V]               >= 0   inverse variance of the noise of a value

    For evidence "cell" (with `precision`), `process_noise` and `log_decay` are `[G, K, V]`. For evidence "state", all
    signals are described in `kalmix.ops.attend`; `angle` is in `kalmix.ops.dense`, and `mix` in `kalmix.ops.ridge`.

    Args:
        design: model of the state and of the observations, from `kalmix.designs` or your own.
        q: queries `[B, T, H, K]`, in float64, float32, bfloat16 or float16. They are not scaled.
        k: keys `[B, T, H, K]`, in the dtype of `q`. They are not normalised.
        v: values `[B, T, G, V]`, in the dtype of `q`; G is a multiple of H. Value head g uses key head g // (G / H). If
            the design has one noise per column (`design.evidence.columns`), V is 1, and each column is a value head.
        belief: belief to continue from, as an earlier call returned it, for N sequences. N is the number of segments,
            or B without segments. Default: the prior of the op, which its docstring gives.
        variance: also return the variance of the read-out.
        segments: `kalmix.Segments` that assign tokens to sequences; by default each batch row is one sequence.
        kernel: name of a kernel of the op; by default chosen by device, dtype and shape.
        **signals: tensors in the dtype of `q`, or in float32 if that dtype has 16 bits. Those in `design.signals` are
            required. For the op `dense`, `obs_noise` has a larger minimum, which `kalmix.ops.dense` gives. Arguments in
            `design.options`, such as `ridge` and `solver` of the op `ridge`, are passed to the op.

    Returns:
        `Filtered`: mean `[B, T, G, V]` in the dtype of `v`, variance or `None`, and the belief after the last token of
        each sequence. The variance, without observation noise, is `[B, T, G, V]` for covariance "diagonal", otherwise
        `[B, T, G, 1]`. Variance and belief are in float32 (float64 if the inputs are). Mean and variance are 0 at
        tokens outside every segment.

    Raises:
        DesignError: a signal is missing, or the design has no signal of that name; `variance` is requested of a design
            without one; or the transition is a matrix, which no op supports (`kalmix.oracle` does).
        ArgumentError: `design` is not a `Design`, or an argument has the wrong type, shape, dtype, device or values.
            Values are checked on CPUs, and on GPUs inside `kalmix.checks()`.
        KernelError: `kernel` is unknown, or no kernel, or not the requested one, supports the call.

    Complexity: that of the op; linear in T except for `attend`.

    Example:
        >>> from kalmix import designs
        >>> q, k, v = (torch.randn(1, 32, 2, 8) for _ in range(3))
        >>> log_decay, noise = -torch.rand(1, 32, 2), torch.rand(1, 32, 2) + 0.1
        >>> y = kalmix.filter(designs.GATED_DELTANET, q, k, v, log_decay=log_decay, obs_noise=noise, reset=noise)
        >>> y.mean.shape
        torch.Size([1, 32, 2, 8])
    """
    check_design(design)
    options = {"belief": belief, "segments": segments, "kernel": kernel}
    if design.has_variance:
        options["variance"] = variance
    elif variance:
        design.check(signals, variance)
    return OPS[design.op].function(q, k, v, **lower(design, k, v, signals), **options)


def lower(design: Design, k: Tensor, v: Tensor, signals: Signals) -> Signals:
    """Convert the signals of a design to the arguments of its op (Table 1 of Memory by Design: noises become gains).

    Args:
        design: the design.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, G, V]`.
        signals: signals by name; `None` means absent.

    Returns:
        Arguments of the op beside q, k and v.

    Raises:
        DesignError: a signal is missing, or is not one of the design's, or no op supports its transition.
        ArgumentError: a signal is not a tensor, keys and values do not match, values are wider than 1 in a design with
            one noise per column, or a design with one decay per head has one per key.
    """
    signals = {name: x for name, x in signals.items() if x is not None}
    design.check(signals)
    sizes: dict[str, int] = {}
    check_shape("k", k, "B T H K", sizes)
    check_shape("v", v, "B T G V", sizes)
    check_heads(sizes)
    for name in (*design.signals, *design.optional):
        if name in signals and not isinstance(signals[name], Tensor):
            raise ArgumentError(name, got=f"a {type(signals[name]).__name__}", expected="a tensor")
    if "matrix" in signals:
        raise DesignError("no op supports a transition by a matrix; use kalmix.oracle")
    check_shared_signals(design, sizes["V"], signals)
    return OPS[design.op].lower(k, v, signals)
