"""`filter`: from a design to its op. The only file that maps one to the other."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kalmix import ops
from kalmix.designs import Design
from kalmix.types import Filtered, belief_dtype


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
    **signals: Tensor,
) -> Filtered:
    """Filter a sequence under a design: lower it to its op, with that op's contract.

    Args:
        design: what is assumed, from `kalmix.designs` or your own.
        q, k: `[B, T, H, K]`; v: `[B, T, G, V]`.
        belief, variance, segments, kernel: as the op takes them.
        signals: what the design takes beside q, k, v (`design.signals`), as the op takes them.

    Raises:
        DesignError: a signal is missing or not the design's.
        ArgumentError: as the op raises it.
    """
    design.check(signals)
    options = {"belief": belief, "variance": variance, "segments": segments, "kernel": kernel}
    return _LOWER[design.op](design, q, k, v, signals, options)


def _lower_diagonal(
    design: Design, q: Tensor, k: Tensor, v: Tensor, signals: dict[str, Tensor], options: dict[str, Any]
) -> Filtered:
    """A transition that holds, or does not diffuse, is one whose log-decay, or noise, is zero."""
    still = v.new_zeros((), dtype=belief_dtype(v.dtype)).expand(v.shape[2], k.shape[3], v.shape[3])
    dynamics = {"log_decay": still, "process_noise": still}
    return ops.diagonal(q, k, v, **(dynamics | signals), **options)


_LOWER = {"diagonal": _lower_diagonal}
