"""Updates: what tokens do to any belief, as a value that can be combined, stored and sent.

An op filters tokens from one belief. An update holds the effect of the tokens on *every* belief, so it can be computed
before the belief is known: for the parts of a long sequence on several GPUs, for example.
"""

from __future__ import annotations

from typing import Any, Protocol, Self

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
from kalmix.types import Belief


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

    All are differentiable, and no setting of torch rounds their matrix products to TF32 or half precision. To process
    several updates, combine them first and apply the result once.

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

    @classmethod
    def identity(cls, belief: Any) -> Self: ...
    @classmethod
    def constant(cls, belief: Any) -> Self: ...
    def then(self, other: Self) -> Self: ...
    def apply(self, belief: Any) -> Any: ...
