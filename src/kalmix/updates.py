"""Updates: what tokens do to any belief, as a value that can be combined, stored and sent.

An op filters tokens from one belief. An update holds the effect of the tokens on *every* belief, so it can be computed
before the belief is known: for the parts of a long sequence on several GPUs, for example.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, Self

from torch import Tensor

from kalmix.errors import ArgumentError, any_of
from kalmix.ops import OPS, OpSpec
from kalmix.ops._additive.update import AdditiveUpdate as AdditiveUpdate
from kalmix.ops._additive.update import additive as additive
from kalmix.ops._delta.update import DeltaUpdate as DeltaUpdate
from kalmix.ops._delta.update import delta as delta
from kalmix.ops._dense.update import DenseUpdate as DenseUpdate
from kalmix.ops._dense.update import dense as dense
from kalmix.ops._diagonal.update import DiagonalUpdate as DiagonalUpdate
from kalmix.ops._diagonal.update import diagonal as diagonal
from kalmix.ops._ridge.update import RidgeUpdate as RidgeUpdate
from kalmix.ops._ridge.update import ridge as ridge
from kalmix.ops._shared.span_filter import SpanCall, filter_spans
from kalmix.types import Belief, Filtered
from kalmix.validation import check_positive_int


class Update(Belief, Protocol):
    """Protocol of updates: an immutable pytree of tensors whose first axis is sequences, as that of beliefs.

    `updates.<op>(k, v, ...)` returns the update by the tokens of each sequence, for the ops `additive`, `delta`,
    `diagonal`, `dense` and `ridge`. With `segments` there is one update for each segment; an empty one changes nothing.
    Beside `take`, `to` and `detach`, which beliefs have too, an update has these methods:

    - `update.apply(belief)` returns the belief after the tokens, given the one before them. Up to rounding it is the
      belief that the op returns.
    - `update.then(other)` returns the update by the tokens of `update` and then those of `other`.
    - `type(update).identity(belief)` returns the update that changes no belief of the shape of `belief`.
    - `type(update).constant(belief)` returns the update that replaces every belief by `belief`. It starts a new
      sequence: `update.then(constant)` equals `constant`.
    - `update.pull_back(belief, *grads)` returns the gradients of the belief before the tokens, given that belief and
      the gradients of the one after them. If `update.is_affine`, they do not depend on the belief, which may be `None`.

    All but the last are differentiable. No setting of torch rounds their matrix products to TF32 or half precision. To
    process several updates, combine them first and apply the result once.

    Example:
        >>> from kalmix import PointBelief, updates
        >>> k = torch.nn.functional.normalize(torch.randn(2, 32, 1, 4), dim=-1)
        >>> v, gain = torch.randn(2, 32, 1, 8), torch.rand(2, 32, 1)
        >>> first = updates.delta(k[:, :20], v[:, :20], gain=gain[:, :20])
        >>> rest = updates.delta(k[:, 20:], v[:, 20:], gain=gain[:, 20:])
        >>> whole = updates.delta(k, v, gain=gain)
        >>> torch.allclose(first.then(rest).mean, whole.mean, atol=1e-5)
        True
    """

    is_affine: ClassVar[bool]

    @classmethod
    def identity(cls, belief: Any) -> Self: ...
    @classmethod
    def constant(cls, belief: Any) -> Self: ...
    def then(self, other: Self) -> Self: ...
    def apply(self, belief: Any) -> Any: ...
    def pull_back(self, belief: Any, *grads: Tensor) -> tuple[Tensor, ...]: ...


def filter_in_spans(
    op: str, q: Tensor, k: Tensor, v: Tensor, *, spans: int, belief: Any = None, **signals: Any
) -> Filtered:
    """Call an op on all spans of a sequence at the same time, for long sequences with few heads on one GPU.

    The sequences are cut into `spans` parts of equal length, which become batch rows: B rows of T tokens become
    B `spans` rows of T / `spans`. First, the function computes the update by each span. Then it applies them to the
    prior, one after the other. Last, it runs the op on all spans from these beliefs. So the op runs about twice, with
    `spans` times as many programs, each of which has fewer sequential steps. In the backward pass, gradients of beliefs
    are passed through the updates; ops without a separate gradient of the prior run their backward pass twice. Updates
    are rounded as the op rounds: those of `additive` and `delta` to the dtype of the tokens.

    It is not used by default, and whether it is faster depends on the GPU and on B, T and the heads: measure it.

    Args:
        op: "additive", "delta", "diagonal", "dense" or "ridge".
        q: queries `[B, T, H, K]`.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, G, V]`.
        spans: number of spans, a divisor of T.
        belief: prior of the op, with B sequences; by default that of the op.
        signals: other arguments of the op, without `segments`.

    Returns:
        `Filtered`, as the op returns it. It has gradients of first order.

    Raises:
        ArgumentError: `op` has no updates, `spans` does not divide T, `segments` are given, or the op or its update
            refuses an argument.

    Complexity: that of the update and of the op, and `spans` - 1 calls of `apply`. Memory for `spans` updates and
    beliefs per sequence.

    Example:
        >>> from kalmix import ops, updates
        >>> k = torch.nn.functional.normalize(torch.randn(1, 64, 2, 4), dim=-1)
        >>> q, v, gain = torch.randn(1, 64, 2, 4), torch.randn(1, 64, 2, 8), torch.rand(1, 64, 2)
        >>> result = updates.filter_in_spans("delta", q, k, v, gain=gain, spans=4)
        >>> torch.allclose(result.mean, ops.delta(q, k, v, gain=gain).mean, atol=1e-5)
        True
    """
    spec = OPS.get(op)
    if spec is None or spec.update is None or spec.prior is None:
        raise ArgumentError("op", got=repr(op), expected=any_of(name for name, x in OPS.items() if x.update))
    check_positive_int("spans", spans)
    if v.ndim != 4 or v.shape[1] % spans:
        problem = f"has shape {list(v.shape)}"
        raise ArgumentError("v", problem=problem, expected=f"[B, T, G, V], T a multiple of {spans} (spans)")
    if signals.get("segments") is not None:
        raise ArgumentError("segments", got="segments", expected="None; sequences are cut into equal spans")
    batch, sizes = v.shape[0], {"G": v.shape[2], "K": k.shape[-1], "V": v.shape[3]}
    prior = spec.prior(v, sizes | {"N": batch}) if belief is None else belief
    arguments = {"q": q, "k": k, "v": v} | signals
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    options = {name: x for name, x in arguments.items() if name not in tensors}
    call = SpanCall(spec, spans, lambda name, x: _cut(spec, x, spans), tuple(tensors), options)
    mean, variance, final = filter_spans(call, prior, list(tensors.values()))
    mean, variance = (None if x is None else x.reshape(batch, -1, *x.shape[2:]) for x in (mean, variance))
    last = type(final)(*(x.unflatten(0, (batch, spans))[:, -1] for x in final))
    return Filtered(mean, variance, last)  # pyright: ignore[reportArgumentType]


def _cut(op: OpSpec, x: Any, spans: int) -> Any:
    """Cut tokens `[B, T, ...]` into `[B * spans, T / spans, ...]`; return constants as they are."""
    is_constant = op.name == "diagonal" and isinstance(x, Tensor) and x.ndim == 3  # decays and noises of cells
    if not isinstance(x, Tensor) or is_constant:
        return x
    return x.reshape(x.shape[0] * spans, -1, *x.shape[2:])
