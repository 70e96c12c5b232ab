"""Update of the op `delta`: an affine map of the memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.beliefs import PointBelief, detach, loadable, take, to
from kalmix.ops._delta.api import PER_HEAD, PER_KEY
from kalmix.ops._delta.api import delta as filter_delta
from kalmix.ops._delta.kernels import KERNELS
from kalmix.ops._delta.signals import DeltaSignals
from kalmix.ops._linear_memory.custom_op import final_memory
from kalmix.ops._shared.update import check_update_tokens, identity_matrix, multiply, to_state_dtype, uses_triton
from kalmix.ops._shared.validation import check_signal
from kalmix.segments import Segments
from kalmix.types import belief_dtype


@loadable
class DeltaUpdate(NamedTuple):
    """Update of the memory M by tokens of the op `delta`: M becomes transition @ M + mean.

    `kalmix.updates.delta` computes it. See `kalmix.updates.Update` for the methods. Fields are not checked.

    Attributes:
        transition: `[N, G, K, K]`, product of A_t - c_t (A_t k_t)' over the tokens, the last one leftmost, with the
            decay A_t and the gain vector c_t. In float32, or float64 if the inputs are.
        mean: `[N, G, K, V]`, memory after the tokens if it was 0 before.

    Example:
        >>> from kalmix import updates
        >>> k = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
        >>> update = updates.delta(k, torch.ones(1, 1, 1, 3), gain=torch.ones(1, 1, 1))
        >>> update.transition[0, 0].tolist()  # the token replaces the first row of the memory
        [[0.0, 0.0], [0.0, 1.0]]
    """

    transition: Tensor
    mean: Tensor

    take = take
    to = to
    detach = detach
    is_affine = True

    @classmethod
    def identity(cls, belief: PointBelief) -> DeltaUpdate:
        """Return the update that changes no belief of the shape of `belief`."""
        (mean,) = belief
        return cls(identity_matrix(mean, mean.shape[2]), torch.zeros_like(mean))

    @classmethod
    def constant(cls, belief: PointBelief) -> DeltaUpdate:
        """Return the update that replaces every belief by `belief`."""
        (mean,) = belief
        return cls(torch.zeros_like(identity_matrix(mean, mean.shape[2])), mean)

    def then(self, other: DeltaUpdate) -> DeltaUpdate:
        """Return the update by the tokens of this update and then those of `other`."""
        dtype = torch.promote_types(self.mean.dtype, other.mean.dtype)
        product = multiply(other.transition, torch.cat(self, -1)).to(dtype)
        transition, mean = product.split([self.mean.shape[2], self.mean.shape[3]], -1)
        return DeltaUpdate(transition, mean + other.mean)

    def apply(self, belief: PointBelief) -> PointBelief:
        """Return the belief after the tokens, given the one before them."""
        dtype = torch.promote_types(self.mean.dtype, belief.mean.dtype)
        return PointBelief(multiply(self.transition, belief.mean).to(dtype) + self.mean)

    def pull_back(self, belief: PointBelief | None, grad: Tensor) -> tuple[Tensor]:
        """Return the gradient of the memory before the tokens, given that of the memory after them."""
        return (multiply(self.transition.mT, grad).to(grad.dtype),)


def delta(
    k: Tensor,
    v: Tensor,
    *,
    gain: Tensor,
    log_decay: Tensor | None = None,
    segments: Segments | None = None,
) -> DeltaUpdate:
    """Compute what tokens do to any belief of the op `delta`.

    `delta(k, v, ...).apply(belief)` is the belief that `kalmix.ops.delta(q, k, v, ..., belief=belief)` returns. The
    function calls the op once, with the values [v, 0] and the prior [0, I], whose columns are V + K.

    Args:
        k, v, gain, log_decay, segments: as `kalmix.ops.delta` takes them. With N segments there are N updates.

    Returns:
        `DeltaUpdate`. It has gradients of first order.

    Raises:
        ArgumentError: an argument has a shape, dtype, device or value other than described; the message names it.

    Complexity: that of the op with values of width V + K, in float32 (float64 for float64 inputs).

    Example:
        >>> from kalmix import PointBelief, ops, updates
        >>> k = torch.nn.functional.normalize(torch.randn(2, 32, 1, 4), dim=-1)
        >>> v, gain = torch.randn(2, 32, 1, 8), torch.rand(2, 32, 1)
        >>> update, prior = updates.delta(k, v, gain=gain), PointBelief(torch.randn(2, 1, 4, 8))
        >>> torch.allclose(update.apply(prior).mean, ops.delta(k, k, v, gain=gain, belief=prior).belief.mean, atol=1e-5)
        True
    """
    sizes = check_update_tokens(k, v, segments)
    check_signal("gain", gain, (PER_HEAD, PER_KEY), sizes, v)
    if log_decay is not None:
        check_signal("log_decay", log_decay, (PER_HEAD, PER_KEY), sizes, v, maximum=0.0)
    k, v, gain, log_decay = to_state_dtype(v, k, v, gain, log_decay)
    return delta_as_filtered(k, v, gain=gain, log_decay=log_decay, segments=segments)


def delta_as_filtered(
    k: Tensor,
    v: Tensor,
    *,
    gain: Tensor,
    log_decay: Tensor | None = None,
    segments: Segments | None = None,
) -> DeltaUpdate:
    """Compute `delta` with the op's own rounding: half precision if the inputs are. Decays are not checked.

    The memory after the tokens then has the rounding error of the op. It filters the values [v, 0] from [0, I].
    """
    sizes = check_update_tokens(k, v, segments)
    columns = torch.cat([v, v.new_zeros(*v.shape[:3], sizes["K"])], -1)
    zero = v.new_zeros(*(sizes[x] for x in "NGKV"), dtype=belief_dtype(v.dtype))
    prior = torch.cat([zero, identity_matrix(zero, sizes["K"])], -1)
    if min(sizes.values()) > 0 and uses_triton("delta", KERNELS, k, columns, gain, log_decay):
        final = final_memory(DeltaSignals(k, k, columns, gain, log_decay), prior, segments, corrects=True)
    else:
        belief = PointBelief(prior)
        signals = {"gain": gain, "log_decay": log_decay, "belief": belief, "segments": segments}
        final = filter_delta(k, k, columns, **signals).belief.mean
    mean, transition = final.split([sizes["V"], sizes["K"]], -1)
    return DeltaUpdate(transition, mean)
