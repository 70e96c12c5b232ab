"""`filter`: lower a design to its op, by the lowering in that op's folder, and call the op."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kalmix.designs import Design
from kalmix.errors import ArgumentError, DesignError
from kalmix.ops import OPS
from kalmix.ops._shared.lowering import Signals
from kalmix.ops._shared.validation import check_heads
from kalmix.types import Filtered
from kalmix.validation import check_shape


def filter(  # noqa: A001 - it is what the library does
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
    """Filter a sequence under a design: lower it to its op, with that op's contract.

    Args:
        design: what is assumed, from `kalmix.designs` or your own.
        q, k: `[B, T, H, K]`; v: `[B, T, G, V]`.
        belief, variance, segments, kernel: as the op takes them.
        signals: what the design takes beside q, k, v (`design.signals`): variances (`obs_noise`, `write_variance`
            and `reset` > 0) and log-decays, `[B, T, G]` or as the op takes them. `reset` is `[B, T, G]`, times the
            identity, or a diagonal `[B, T, G, K]`. Also the design's options (`design.options`), as its op takes them.

    Raises:
        DesignError: a signal is missing or not the design's, or the design has no variance, or no op for a matrix.
        ArgumentError: as the op raises it.
    """
    options = {"belief": belief, "segments": segments, "kernel": kernel}
    if design.has_variance:
        options["variance"] = variance
    elif variance:
        design.check(signals, variance)
    return OPS[design.op].function(q, k, v, **lower(design, k, v, signals), **options)


def lower(design: Design, k: Tensor, v: Tensor, signals: Signals) -> Signals:
    """The signals of a design as its op takes them: noises become gains (Table 1 of Memory by Design).

    Raises:
        DesignError: a signal is missing or not the design's, or no op takes its transition.
    """
    signals = {name: x for name, x in signals.items() if x is not None}
    design.check(signals)
    sizes: dict[str, int] = {}
    check_shape("k", k, "B T H K", sizes)
    check_shape("v", v, "B T G V", sizes)
    check_heads(sizes)
    for name in (*design.signals, *design.optional):
        if name in signals and not isinstance(signals[name], Tensor):
            raise ArgumentError(name, got=type(signals[name]).__name__, expected="a tensor")
    if "matrix" in signals:
        raise DesignError("no op takes a transition by a matrix; kalmix.oracle does")
    return OPS[design.op].lower(k, v, signals)
