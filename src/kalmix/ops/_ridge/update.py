"""Update of the op `ridge`: a decay of both sums, and what the tokens add to them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.beliefs import RidgeBelief, detach, loadable, take, to
from kalmix.ops._additive.update import additive
from kalmix.ops._ridge.api import PER_HEAD
from kalmix.ops._shared.update import check_update_tokens
from kalmix.ops._shared.validation import check_signal
from kalmix.segments import Segments


@loadable
class RidgeUpdate(NamedTuple):
    """Update of the two sums of a `RidgeBelief` by tokens: cross becomes decay * cross + `cross`, and gram likewise.

    `kalmix.updates.ridge` computes it. See `kalmix.updates.Update` for the methods. Fields are not checked.

    Attributes:
        decay: `[N, G, 1, 1]`, product of the decays of the tokens.
        cross: `[N, G, K, V]`, what the tokens add to cross. In float32, or float64 if the inputs are.
        gram: `[N, G, K, K]`, what the tokens add to gram.

    Example:
        >>> from kalmix import updates
        >>> update = updates.ridge(torch.randn(1, 16, 1, 4), torch.randn(1, 16, 1, 8))
        >>> update.cross.shape, update.gram.shape
        (torch.Size([1, 1, 4, 8]), torch.Size([1, 1, 4, 4]))
    """

    decay: Tensor
    cross: Tensor
    gram: Tensor

    take = take
    to = to
    detach = detach
    is_affine = True

    @classmethod
    def identity(cls, belief: RidgeBelief) -> RidgeUpdate:
        """Return the update that changes no belief of the shape of `belief`."""
        cross, gram = belief
        return cls(cross.new_ones(*cross.shape[:2], 1, 1), torch.zeros_like(cross), torch.zeros_like(gram))

    @classmethod
    def constant(cls, belief: RidgeBelief) -> RidgeUpdate:
        """Return the update that replaces every belief by `belief`."""
        return cls(belief.cross.new_zeros(*belief.cross.shape[:2], 1, 1), *belief)

    def then(self, other: RidgeUpdate) -> RidgeUpdate:
        """Return the update by the tokens of this update and then those of `other`."""
        sums = (torch.addcmul(y, other.decay, x) for x, y in zip(self[1:], other[1:], strict=True))
        return RidgeUpdate(other.decay * self.decay, *sums)

    def apply(self, belief: RidgeBelief) -> RidgeBelief:
        """Return the belief after the tokens, given the one before them."""
        return RidgeBelief(*(torch.addcmul(y, self.decay, x) for x, y in zip(belief, self[1:], strict=True)))

    def pull_back(self, belief: RidgeBelief | None, *grads: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the sums before the tokens, given those of the sums after them."""
        return tuple(self.decay * grad for grad in grads)


def ridge(
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    gain: Tensor | None = None,
    segments: Segments | None = None,
) -> RidgeUpdate:
    """Compute what tokens do to any belief of the op `ridge`.

    `ridge(k, v, ...).apply(belief)` is the belief that `kalmix.ops.ridge(q, k, v, ..., belief=belief)` returns. The
    arguments `ridge`, `solver` and `mix` of the op do not change beliefs.

    Args:
        k, v, log_decay, gain, segments: as `kalmix.ops.ridge` takes them. With N segments there are N updates.

    Returns:
        `RidgeUpdate`. It has gradients of first order.

    Raises:
        ArgumentError: an argument has a shape, dtype, device or value other than described; the message names it.

    Complexity: O(T K (K + V)) time.

    Example:
        >>> from kalmix import updates
        >>> k, v = torch.randn(1, 32, 1, 4), torch.randn(1, 32, 1, 8)
        >>> first, rest = updates.ridge(k[:, :20], v[:, :20]), updates.ridge(k[:, 20:], v[:, 20:])
        >>> torch.allclose(first.then(rest).gram, updates.ridge(k, v).gram, atol=1e-5)
        True
    """
    sizes = check_update_tokens(k, v, segments)
    if log_decay is not None:
        check_signal("log_decay", log_decay, PER_HEAD, sizes, v, maximum=0.0)
    if gain is not None:
        check_signal("gain", gain, PER_HEAD, sizes, v, minimum=0.0)
    keys = k.repeat_interleave(sizes["G"] // sizes["H"], 2)
    decay, sums = additive(k, torch.cat([v, keys], -1), log_decay=log_decay, gain=gain, segments=segments)
    return RidgeUpdate(decay, *sums.split([sizes["V"], sizes["K"]], -1))
