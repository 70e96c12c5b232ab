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
from torch.utils._pytree import tree_map_only

from kalmix.designs import Design
from kalmix.designs.spec import check_design
from kalmix.designs.validation import check_shared_signals
from kalmix.errors import ArgumentError
from kalmix.ops import OPS, OpSpec
from kalmix.ops._shared.lowering import Signals
from kalmix.ops._shared.recursion import Recursion
from kalmix.ops._shared.validation import check_heads
from kalmix.segments import Segments, check_segments
from kalmix.types import Filtered
from kalmix.validation import FLOATS, check_bool, check_dtype_and_device, check_shape, checks

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
        k: keys `[B, T, H, K]`, in any of these dtypes, as are v and the signals.
        v: values `[B, T, G, V]`. G must be a multiple of H; value head g uses key head g // (G / H).
        belief: prior, a belief of the design's op, such as the one that `kalmix.filter` or an earlier call returned,
            for N sequences. N is B, or the number of segments. For decay "matrix" it is a `DenseBelief`. Default: the
            prior of the op.
        variance: also return the variance of the read-out.
        segments: `kalmix.Segments` that assign tokens to sequences. Default: each batch row is one sequence.
        **signals: the signals and options of the design, as for `kalmix.filter`: those in `design.signals` are
            required, those in `design.optional` and `design.options` are not. In addition, a transition with decay
            "matrix" has the signal `matrix`, `[B, T, G, K, K]`. The option `solver` has no effect.

    Returns:
        `Filtered`, all in float64: mean `[B, T, G, V]`; variance `[B, T, G, V]`, or `[B, T, G, 1]` if all columns share
        it, `None` unless `variance=True`; and the belief after the last token of each sequence. Mean and variance are
        0 at tokens outside every segment. All are differentiable.

    Raises:
        DesignError: a signal is missing, or the design has no signal or option of that name, or `variance` is requested
            of a design without one.
        ArgumentError: `design` is not a `Design`, or an argument has a shape, dtype or device other than described.

    The signs of signals, NaN and infinity are not checked: the result is that of the equations.

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
    check_bool("variance", variance)
    design.check(signals, variance)
    op = OPS[design.op]
    recursion, options = op.recursion, {name: signals.pop(name) for name in design.options if name in signals}
    tokens = {"q": q, "k": k, "v": v}
    count = check_tensors(recursion, tokens, signals, segments)
    check_shared_signals(design, v.shape[3], signals)
    no_sequences = _check_with_op(op, tokens, signals, options | {"belief": _without_rows(op, belief, count)})
    q, k = q.double(), k.double()
    if not recursion.shares_keys:
        q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], dim=2) for x in (q, k))
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

    final = type(finals[0])(*(_stack(leaf) for leaf in zip(*finals, strict=True))) if finals else no_sequences
    spread = assemble(variances, v.shape[3] if recursion.columns else 1) if variance else None
    return Filtered(assemble(means, v.shape[3]), spread, final)


def check_tensors(recursion: Recursion, tokens: Signals, signals: Signals, segments: Segments | None) -> int:
    """Check the dtypes and devices of q, k, v and signals, that their batch and time axes agree, and the segments.

    Returns the number of sequences.
    """
    sizes: dict[str, int] = {}
    for name, layout in (("q", "B T H K"), ("k", "B T H K"), ("v", "B T G V")):
        check_shape(name, tokens[name], layout, sizes)
        check_dtype_and_device(name, tokens[name], FLOATS, tokens["q"].device)
    check_heads(sizes)
    for name, x in signals.items():
        fixed = name in recursion.invariant and getattr(x, "ndim", 9) <= 3
        if not isinstance(x, Tensor) or not (fixed or x.shape[:2] == (sizes["B"], sizes["T"])):
            got = f"has shape {list(x.shape)}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
            raise ArgumentError(name, problem=got, expected=f"a tensor [B={sizes['B']}, T={sizes['T']}, ...]")
        check_dtype_and_device(name, x, (*FLOATS, torch.int64, torch.int32), tokens["q"].device)
    if "matrix" in signals:
        check_shape("matrix", signals["matrix"], "B T G K K", sizes)
    return check_segments(segments, sizes["B"], sizes["T"], tokens["q"].device)


def _without_rows(op: OpSpec, belief: Any, count: int) -> Any:
    """Return the first 0 sequences of a belief of `op`; check that it has `count`. Return any other value as it is."""
    if not isinstance(belief, op.belief):
        return belief
    for field, x in zip(belief._fields, belief, strict=True):
        if not isinstance(x, Tensor) or x.shape[:1] != (count,):
            problem = f"has shape {list(x.shape)}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
            raise ArgumentError(f"belief.{field}", problem=problem, expected=f"a tensor [N={count}, ...]")
    return op.belief(*(x[:0] for x in belief))


def _check_with_op(op: OpSpec, tokens: Signals, signals: Signals, options: Signals) -> Any:
    """Check the shapes of signals, the options and the belief by a call of the op for 0 sequences.

    Args:
        op: the op of the design.
        tokens: q, k and v.
        signals: signals of the design.
        options: options of the op, and the belief.

    Returns:
        The final belief, of 0 sequences.
    """
    signals = {name: x for name, x in signals.items() if name != "matrix"}
    tokens, signals, options = tree_map_only(
        Tensor, lambda x: x.double() if x.is_floating_point() else x, (tokens, signals, options)
    )
    none = Segments(tokens["v"].new_zeros(0, 3, dtype=torch.int32))
    with checks(False):
        arguments = op.lower(tokens["k"], tokens["v"], signals)
        return op.function(**tokens, **arguments, **options, segments=none).belief


def _stack(leaves: tuple[Tensor, ...]) -> Tensor:
    """Stack the beliefs of all sequences; pad shorter histories with empty slots in front."""
    longest = max(x.shape[0] for x in leaves)
    empty = 0.0 if leaves[0].is_floating_point() else -1
    return torch.stack([pad(x, (0, 0) * (x.ndim - 1) + (longest - x.shape[0], 0), value=empty) for x in leaves])
