"""`kalmix.oracle`: the exact filter of any design, one token at a time, in float64.

This is the specification that all kernels are tested against, so it is written for readability, not speed. The
recursion of each op (predict, update, read) is in `ops/_<op>/oracle.py`, which imports torch only; this file applies it
to sequences. All of it is differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kalmix.designs import Design
from kalmix.designs.spec import check_design
from kalmix.errors import ArgumentError
from kalmix.ops import OPS
from kalmix.ops._shared.validation import check_heads
from kalmix.segments import Segments, check_segments
from kalmix.types import Filtered
from kalmix.validation import check_shape

Store = Callable[[Any], Any]

_STORE: ContextVar[Store | None] = ContextVar("kalmix_oracle_store", default=None)


@contextmanager
def transform_stored_beliefs(store: Store) -> Iterator[None]:
    """Apply `store` to the belief after each token in calls of `oracle`, for example to round it to a smaller dtype."""
    token = _STORE.set(store)
    try:
        yield
    finally:
        _STORE.reset(token)


def oracle(
    design: Design,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    belief: Any = None,
    variance: bool = False,
    segments: Segments | None = None,
    **signals: Any,
) -> Filtered:
    """Filter sequences under a design by its defining recursion, in float64.

    Use it to check a kernel or a new design. For the same inputs `kalmix.filter` returns the same result, up to
    rounding and, for `ridge`, the error of its solver, since the oracle solves exactly.

    Args:
        design: model of the state and of the observations.
        q: queries `[B, T, H, K]`, in float64, float32, bfloat16 or float16.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, G, V]`; G is a multiple of H.
        belief: belief to continue from, with N sequences; the op's prior by default.
        variance: also return the variance of the read-out.
        segments: runs of tokens that form sequences; by default each batch row is one sequence.
        **signals: the signals of the design (`design.signals`, `design.optional`), per token `[B, T, ...]`.
            Time-invariant ones are `[G, K, V]` (transitions of cells) or `[H]` and `[H, C]` (transitions in continuous
            time). A `matrix` is `[B, T, G, K, K]`. Also the design's options (`design.options`); `solver` has no
            effect.

    Returns:
        `Filtered` in float64: mean `[B, T, G, V]`, variance `[B, T, G, V]` or `[B, T, G, 1]` (or `None`), and belief.

    Raises:
        DesignError: a signal is missing, or is not one of the design's, or the design has no variance.
        ArgumentError: `design` is not a `Design`, or a tensor or `segments` has another shape. Values are not checked.

    Complexity: one Python step per token.

    Example:
        >>> from kalmix import designs
        >>> q, k, v = (torch.randn(1, 8, 1, 4) for _ in range(3))
        >>> signals = {"obs_noise": torch.rand(1, 8, 1) + 0.1, "reset": torch.ones(1, 8, 1)}
        >>> exact = kalmix.oracle(designs.DELTANET, q, k, v, **signals)
        >>> fast = kalmix.filter(designs.DELTANET, q, k, v, **signals)
        >>> exact.mean.dtype, torch.allclose(exact.mean.float(), fast.mean, atol=1e-5)
        (torch.float64, True)
    """
    check_design(design)
    signals = {name: x for name, x in signals.items() if x is not None}
    design.check(signals, variance)
    check_inputs(q, k, v, segments)
    op = OPS[design.op]
    recursion, options = op.recursion, {name: signals.pop(name) for name in design.options if name in signals}
    q, k = q.double(), k.double()
    if not recursion.shares_keys:
        q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], dim=2) for x in (q, k))
    for name, x in signals.items():
        fixed = name in recursion.invariant and getattr(x, "ndim", 9) <= 3
        if not isinstance(x, Tensor) or not (fixed or x.shape[:2] == v.shape[:2]):
            got = f"has shape {list(x.shape)}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
            raise ArgumentError(name, problem=got, expected=f"a tensor [B={v.shape[0]}, T={v.shape[1]}, ...]")
    invariant = [name for name in recursion.invariant if name in signals and signals[name].ndim <= 3]
    shared = options | {name: signals[name].double() for name in invariant}
    per_token = {"q": q, "k": k, "v": v.double()}
    per_token |= {name: x.double() for name, x in signals.items() if name not in shared}

    segments = Segments.whole(v.shape[0], v.shape[1]) if segments is None else segments
    store = _STORE.get() or (lambda state: state)
    means, variances, finals = {}, {}, []
    for n, (row, start, stop) in enumerate(segments.rows.tolist()):
        if belief is None:
            state = op.belief(*recursion.prior(k.new_zeros(k.shape[2:]), per_token["v"].new_zeros(v.shape[2:])))
        else:
            state = type(belief)(*(leaf[n].double() if leaf.is_floating_point() else leaf[n] for leaf in belief))
        for t in range(start, stop):
            token = shared | {name: x[row, t] for name, x in per_token.items()}
            state = store(op.belief(*recursion.update(recursion.predict(state, token), token)))
            means[row, t], variances[row, t] = recursion.read(state, token)
        finals.append(state)

    def assemble(reads: dict[tuple[int, int], Any], width: int) -> Tensor:
        zero = v.new_zeros(v.shape[2], width, dtype=torch.float64)
        tokens = [reads.get((b, t), zero) for b in range(v.shape[0]) for t in range(v.shape[1])]
        return (torch.stack(tokens) if tokens else zero[:0]).reshape(*v.shape[:3], width)

    final = type(finals[0])(*(_stack(leaf) for leaf in zip(*finals, strict=True))) if finals else belief
    spread = assemble(variances, v.shape[3] if recursion.columns else 1) if variance else None
    return Filtered(assemble(means, v.shape[3]), spread, final)


def check_inputs(q: Tensor, k: Tensor, v: Tensor, segments: Segments | None) -> None:
    """Check the shapes of q and k `[B, T, H, K]` and v `[B, T, G, V]`, and that segments fit them."""
    sizes: dict[str, int] = {}
    for name, x, layout in (("q", q, "B T H K"), ("k", k, "B T H K"), ("v", v, "B T G V")):
        check_shape(name, x, layout, sizes)
    check_heads(sizes)
    check_segments(segments, sizes["B"], sizes["T"], v.device)


def _stack(leaves: tuple[Tensor, ...]) -> Tensor:
    """Stack the beliefs of all sequences; pad shorter histories with empty slots in front."""
    longest = max(x.shape[0] for x in leaves)
    empty = 0.0 if leaves[0].is_floating_point() else -1
    return torch.stack([pad(x, (0, 0) * (x.ndim - 1) + (longest - x.shape[0], 0), value=empty) for x in leaves])
