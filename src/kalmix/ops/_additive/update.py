"""Update of the op `additive`: a decay of the memory, and what the tokens add to it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.beliefs import PointBelief, detach, loadable, take, to
from kalmix.ops._additive.api import PER_HEAD, PER_KEY
from kalmix.ops._additive.api import additive as filter_additive
from kalmix.ops._additive.kernels import KERNELS
from kalmix.ops._additive.signals import AdditiveSignals
from kalmix.ops._linear_memory.custom_op import final_memory
from kalmix.ops._shared.update import check_update_tokens, to_state_dtype, total_decay, uses_triton
from kalmix.ops._shared.validation import check_signal
from kalmix.segments import Segments
from kalmix.types import belief_dtype


@loadable
class AdditiveUpdate(NamedTuple):
    """Update of the memory M by tokens of the op `additive`: M becomes decay * M + mean.

    `kalmix.updates.additive` computes it. See `kalmix.updates.Update` for the methods. Fields are not checked.

    Attributes:
        decay: `[N, G, K, 1]`, or `[N, G, 1, 1]` if all rows have the same; product of the decays of the tokens.
        mean: `[N, G, K, V]`, memory after the tokens if it was 0 before. In float32, or float64 if the inputs are.

    Example:
        >>> from kalmix import PointBelief, updates
        >>> update = updates.AdditiveUpdate.identity(PointBelief(torch.zeros(2, 1, 4, 8)))
        >>> update.decay.shape, bool((update.decay == 1).all())
        (torch.Size([2, 1, 1, 1]), True)
    """

    decay: Tensor
    mean: Tensor

    take = take
    to = to
    detach = detach
    is_affine = True

    @classmethod
    def identity(cls, belief: PointBelief) -> AdditiveUpdate:
        """Return the update that changes no belief of the shape of `belief`."""
        (mean,) = belief
        return cls(mean.new_ones(*mean.shape[:2], 1, 1), torch.zeros_like(mean))

    @classmethod
    def constant(cls, belief: PointBelief) -> AdditiveUpdate:
        """Return the update that replaces every belief by `belief`."""
        (mean,) = belief
        return cls(mean.new_zeros(*mean.shape[:2], 1, 1), mean)

    def then(self, other: AdditiveUpdate) -> AdditiveUpdate:
        """Return the update by the tokens of this update and then those of `other`."""
        return AdditiveUpdate(other.decay * self.decay, torch.addcmul(other.mean, other.decay, self.mean))

    def apply(self, belief: PointBelief) -> PointBelief:
        """Return the belief after the tokens, given the one before them."""
        return PointBelief(torch.addcmul(self.mean, self.decay, belief.mean))

    def pull_back(self, belief: PointBelief | None, grad: Tensor) -> tuple[Tensor]:
        """Return the gradient of the memory before the tokens, given that of the memory after them."""
        return (self.decay * grad,)


def additive(
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    gain: Tensor | None = None,
    segments: Segments | None = None,
) -> AdditiveUpdate:
    """Compute what tokens do to any belief of the op `additive`.

    `additive(k, v, ...).apply(belief)` is the belief that `kalmix.ops.additive(q, k, v, ..., belief=belief)` returns.

    Args:
        k, v, log_decay, gain, segments: as `kalmix.ops.additive` takes them. With N segments there are N updates.

    Returns:
        `AdditiveUpdate`. It has gradients of first order.

    Raises:
        ArgumentError: an argument has a shape, dtype, device or value other than described; the message names it.

    Complexity: that of the op, in float32 (float64 for float64 inputs).

    Example:
        >>> from kalmix import PointBelief, ops, updates
        >>> k, v, log_decay = torch.randn(2, 32, 1, 4), torch.randn(2, 32, 1, 8), -torch.rand(2, 32, 1)
        >>> update = updates.additive(k, v, log_decay=log_decay)
        >>> prior = PointBelief(torch.randn(2, 1, 4, 8))
        >>> belief = ops.additive(k, k, v, log_decay=log_decay, belief=prior).belief
        >>> torch.allclose(update.apply(prior).mean, belief.mean, atol=1e-5)
        True
    """
    sizes = check_update_tokens(k, v, segments)
    if log_decay is not None:
        check_signal("log_decay", log_decay, (PER_HEAD, PER_KEY), sizes, v, maximum=0.0)
    if gain is not None:
        check_signal("gain", gain, (PER_HEAD,), sizes, v)
    k, v, log_decay, gain = to_state_dtype(v, k, v, log_decay, gain)
    return additive_as_filtered(k, v, log_decay=log_decay, gain=gain, segments=segments)


def additive_as_filtered(
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    gain: Tensor | None = None,
    segments: Segments | None = None,
) -> AdditiveUpdate:
    """Compute `additive` with the op's own rounding: half precision if the inputs are. Decays are not checked.

    The memory after the tokens then has the rounding error of the op. It filters the values from a memory of zeros.
    """
    sizes = check_update_tokens(k, v, segments)
    if min(sizes.values()) > 0 and uses_triton("additive", KERNELS, k, v, log_decay, gain):
        prior = v.new_zeros(*(sizes[x] for x in "NGKV"), dtype=belief_dtype(v.dtype))
        memory = final_memory(AdditiveSignals(k, k, v, log_decay, gain), prior, segments, corrects=False)
    else:
        memory = filter_additive(k, k, v, log_decay=log_decay, gain=gain, segments=segments).belief.mean
    return AdditiveUpdate(total_decay(memory, log_decay, sizes, segments), memory)
