"""`kalmix.filter`: convert the signals of a design to the arguments of its op, and call the op."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kalmix.designs import Design
from kalmix.designs.spec import check_design
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

    For covariances "diagonal" and "dense" the result is the exact posterior, up to rounding. For "reset" and "lag" it
    is the approximation that `kalmix.designs.Covariance` describes. For "information" it is a ridge regression, up to
    the error of the solver. For "none" there is a mean only.

    Signals of most designs are `obs_noise`, the variance of the observation noise of a value; `process_noise`, the
    variance that a transition adds; `write_variance`, the prior variance of a written value; `reset`, the covariance
    that replaces the predicted one; `precision`, the inverse variance of an observation of cells; and `log_decay`, the
    logarithm of the decay per token.

    Args:
        design: model of the state and of the observations, from `kalmix.designs` or your own.
        q: queries `[B, T, H, K]`, in float64, float32, bfloat16 or float16.
        k: keys `[B, T, H, K]`, in the dtype of `q`.
        v: values `[B, T, G, V]`, in the dtype of `q`; G is a multiple of H.
        belief: belief to continue from, for N sequences; the op's prior by default. N is the number of segments, or B
            without segments.
        variance: also return the variance of the read-out.
        segments: `kalmix.Segments` that assign tokens to sequences; by default each batch row is one sequence.
        kernel: name of a kernel of the op; by default chosen by device, dtype and shape.
        **signals: the signals in `design.signals` are required, those in `design.optional` are not. Their shape is
            `[B, T, G]`, or another that the op documents; `reset` may be a diagonal, `[B, T, G, K]`. `obs_noise`,
            `write_variance` and `reset` are > 0 (`kalmix.ops.dense` has a larger minimum), `precision` and
            `process_noise` >= 0, and log-decays <= 0. Arguments in `design.options`, such as `ridge` and `solver` of
            the op `ridge`, are passed to the op.

    Returns:
        `Filtered`: mean `[B, T, G, V]`, variance (or `None`) and the belief after the last token of each sequence.

    Raises:
        DesignError: a signal is missing, or the design has no signal of that name; `variance` is requested of a design
            without one; or the transition is a matrix, which no op supports (`kalmix.oracle` does).
        ArgumentError: `design` is not a `Design`, or a tensor has the wrong shape, dtype, device or values.
        KernelError: no kernel, or not the requested one, supports the call.

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
        ArgumentError: a signal is not a tensor, or keys and values do not match.
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
    return OPS[design.op].lower(k, v, signals)
