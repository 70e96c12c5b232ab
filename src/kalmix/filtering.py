"""`filter`: from a design to its op. The only file that maps one to the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix.designs import Design
from kalmix.errors import ArgumentError, DesignError
from kalmix.ops import OPS
from kalmix.ops._shared.validation import check_heads
from kalmix.types import Filtered, belief_dtype
from kalmix.validation import FLOATS, check_kind, check_range, check_shape

Signals = dict[str, Any]


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
    if design.uncertain:
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
            raise ArgumentError(name, got=type(signals[name]).__name__, needs="a tensor")
    if "matrix" in signals:
        raise DesignError("no op takes a transition by a matrix; kalmix.oracle does")
    return _LOWER[design.op](k, v, signals)


def _lower_additive(k: Tensor, v: Tensor, signals: Signals) -> Signals:
    """Equation 19: the gain is omega = write_variance / (write_variance + r^2)."""
    variance, noise = _positive("write_variance", signals), _positive("obs_noise", signals)
    return signals | {"gain": 1 / (1 + noise / variance)}  # so written, the gradients do not cancel


def _lower_delta(k: Tensor, v: Tensor, signals: Signals) -> Signals:
    """Equation 17: the gain is eta = reset / (r^2 + reset |k|^2); of a diagonal reset, that vector times k."""
    reset, noise = _positive("reset", signals), _positive("obs_noise", signals)
    key = k.to(belief_dtype(k.dtype)).repeat_interleave(v.shape[2] // k.shape[2], 2)
    if reset.ndim == 3:
        return signals | {"gain": 1 / (noise / reset + key.square().sum(-1))}
    return signals | {"gain": reset * key / (noise[..., None] + (reset * key.square()).sum(-1, keepdim=True))}


def _lower_diagonal(k: Tensor, v: Tensor, signals: Signals) -> Signals:
    """A transition that holds, or does not diffuse, is one whose log-decay, or noise, is zero."""
    still = v.new_zeros((), dtype=belief_dtype(v.dtype)).expand(v.shape[2], k.shape[3], v.shape[3])
    return {"log_decay": still, "process_noise": still} | signals


def _lower_dense(k: Tensor, v: Tensor, signals: Signals) -> Signals:
    """Noises are the op's own."""
    return {"process_noise": v.new_zeros((), dtype=belief_dtype(v.dtype)).expand(v.shape[:3])} | signals


def _lower_ridge(k: Tensor, v: Tensor, signals: Signals) -> Signals:
    """A token weighs the inverse of its noise."""
    gain = 1 / _positive("obs_noise", signals)
    return signals | {"gain": gain}


def _lower_attend(k: Tensor, v: Tensor, signals: Signals) -> Signals:
    """Dynamics and noises are the op's own."""
    return signals


def _positive(name: str, signals: Signals) -> Tensor:
    check_kind(name, signals[name], FLOATS, signals[name].device)
    check_range(name, signals[name], least=torch.finfo(torch.float32).tiny)
    return signals.pop(name)


_LOWER = {
    "additive": _lower_additive,
    "delta": _lower_delta,
    "diagonal": _lower_diagonal,
    "dense": _lower_dense,
    "ridge": _lower_ridge,
    "attend": _lower_attend,
}
