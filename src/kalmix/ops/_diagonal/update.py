"""Update of the op `diagonal`: five numbers per cell."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kalmix.beliefs import DiagonalBelief, detach, loadable, take, to
from kalmix.ops._diagonal.api import DYNAMICS
from kalmix.ops._diagonal.custom_op import map_sequences
from kalmix.ops._diagonal.kernels import KERNELS
from kalmix.ops._shared.batching import MAX_ENTRIES_CPU, MAX_ENTRIES_GPU
from kalmix.ops._shared.update import check_update_tokens, to_state_dtype, uses_triton
from kalmix.ops._shared.validation import check_signal
from kalmix.segments import Segments, Tiles

TILE = 256  # most tokens of a tile, a power of two


@loadable
class DiagonalUpdate(NamedTuple):
    """Update of the independent cells of a `DiagonalBelief` by tokens.

    A cell with mean mu and variance s becomes, with d = 1 / (1 + s J):

        mu' = A (mu + s eta) d + b,   s' = A^2 s d + C

    `kalmix.updates.diagonal` computes it. See `kalmix.updates.Update` for the methods. Fields are not checked.

    Attributes:
        factor: `[N, G, K, V]`, A, the product of decays and shrinkages if the variance before the tokens is 0. In
            float32, or float64 if the inputs are.
        information: J, in the same shape: inverse variance that the tokens contribute to the cell before them, >= 0.
        information_mean: eta, in the same shape: inverse variance times mean that they contribute.
        mean: b, in the same shape: mean after the tokens if mean and variance are 0 before.
        variance: C, in the same shape: variance after the tokens if it is 0 before.

    Example:
        >>> from kalmix import DiagonalBelief, updates
        >>> belief = DiagonalBelief(torch.zeros(1, 1, 4, 8), torch.ones(1, 1, 4, 8))
        >>> update = updates.DiagonalUpdate.identity(belief)
        >>> update.apply(belief).variance.equal(belief.variance)
        True
    """

    factor: Tensor
    information: Tensor
    information_mean: Tensor
    mean: Tensor
    variance: Tensor

    take = take
    to = to
    detach = detach
    is_affine = False

    @classmethod
    def identity(cls, belief: DiagonalBelief) -> DiagonalUpdate:
        """Return the update that changes no belief of the shape of `belief`."""
        zero = torch.zeros_like(belief.mean)
        return cls(torch.ones_like(zero), zero, zero, zero, zero)

    @classmethod
    def constant(cls, belief: DiagonalBelief) -> DiagonalUpdate:
        """Return the update that replaces every belief by `belief`."""
        zero = torch.zeros_like(belief.mean)
        return cls(zero, zero, zero, *belief)

    def then(self, other: DiagonalUpdate) -> DiagonalUpdate:
        """Return the update by the tokens of this update and then those of `other`."""
        shrinkage = 1 / (1 + self.variance * other.information)
        entry, exit_factor = self.factor * shrinkage, other.factor * shrinkage
        return DiagonalUpdate(
            exit_factor * self.factor,
            torch.addcmul(self.information, entry * self.factor, other.information),
            torch.addcmul(self.information_mean, entry, other.information_mean - other.information * self.mean),
            torch.addcmul(other.mean, exit_factor, self.mean + self.variance * other.information_mean),
            torch.addcmul(other.variance, exit_factor * other.factor, self.variance),
        )

    def apply(self, belief: DiagonalBelief) -> DiagonalBelief:
        """Return the belief after the tokens, given the one before them."""
        mean, var = belief
        factor = self.factor / (1 + var * self.information)
        return DiagonalBelief(
            torch.addcmul(self.mean, factor, mean + var * self.information_mean),
            torch.addcmul(self.variance, factor * self.factor, var),
        )

    def pull_back(self, belief: DiagonalBelief, grad_mean: Tensor, grad_var: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the belief before the tokens, given that belief and the gradients of the one after.

        With d = 1 / (1 + s J): dmu'/dmu = A d, dmu'/ds = A d (eta - (mu + s eta) J d), ds'/ds = (A d)^2.
        """
        mean, var = belief
        shrinkage = 1 / (1 + var * self.information)
        factor = self.factor * shrinkage
        before = factor * grad_mean
        innovation = self.information_mean - (mean + var * self.information_mean) * self.information * shrinkage
        return before, torch.addcmul(innovation * before, factor * factor, grad_var)


def diagonal(
    k: Tensor,
    v: Tensor,
    *,
    precision: Tensor,
    log_decay: Tensor,
    process_noise: Tensor,
    segments: Segments | None = None,
) -> DiagonalUpdate:
    """Compute what tokens do to any belief of the op `diagonal`.

    `diagonal(k, v, ...).apply(belief)` is the belief that `kalmix.ops.diagonal(q, k, v, ..., belief=belief)` returns.
    Tokens are combined pairwise, in a tree.

    Args:
        k, v, precision, log_decay, process_noise, segments: as `kalmix.ops.diagonal` takes them. With N segments there
            are N updates.

    Returns:
        `DiagonalUpdate`. It has gradients of every order.

    Raises:
        ArgumentError: an argument has a shape, dtype, device or value other than described; the message names it.

    On a GPU, kernels in Triton compute it where no gradient is needed.

    Complexity: O(T K V) time, in float32 (float64 for float64 inputs). Training stores O(T (K + V) + T K V / 256)
    numbers.

    Example:
        >>> from kalmix import DiagonalBelief, ops, updates
        >>> k, v, precision = torch.randn(1, 32, 1, 4), torch.randn(1, 32, 1, 8), torch.rand(1, 32, 1, 8)
        >>> dynamics = {"log_decay": torch.full((1, 4, 8), -0.1), "process_noise": torch.full((1, 4, 8), 0.02)}
        >>> update = updates.diagonal(k, v, precision=precision, **dynamics)
        >>> prior = DiagonalBelief(torch.randn(1, 1, 4, 8), torch.rand(1, 1, 4, 8))
        >>> belief = ops.diagonal(k, k, v, precision=precision, **dynamics, belief=prior).belief
        >>> torch.allclose(update.apply(prior).variance, belief.variance, atol=1e-5)
        True
    """
    sizes = check_update_tokens(k, v, segments)
    check_signal("precision", precision, ("B T G V",), sizes, v, minimum=0.0)
    check_signal("log_decay", log_decay, DYNAMICS, sizes, v, maximum=0.0)
    check_signal("process_noise", process_noise, DYNAMICS, sizes, v, minimum=0.0)
    if min(sizes.values()) > 0 and uses_triton("diagonal", KERNELS, k, v, precision, log_decay, process_noise):
        return DiagonalUpdate(*map_sequences(k, v, precision, log_decay, process_noise, segments))
    k, v, precision, log_decay, process_noise = to_state_dtype(v, k, v, precision, log_decay, process_noise)
    belief = DiagonalBelief(*(v.new_zeros(*(sizes[x] for x in "NGKV")) for _ in range(2)))
    if min(sizes.values()) == 0:
        return DiagonalUpdate.identity(belief)
    segments = Segments.whole(sizes["B"], sizes["T"], k.device) if segments is None else segments
    size = min(TILE, 1 << (sizes["T"] - 1).bit_length())
    tiles = segments.tiles(sizes["B"], sizes["T"], size)
    signals = (k.repeat_interleave(sizes["G"] // sizes["H"], 2), v, precision, log_decay.exp(), process_noise)
    max_entries = MAX_ENTRIES_CPU if k.device.type == "cpu" else MAX_ENTRIES_GPU
    together = max(1, max_entries // (size * sizes["G"] * sizes["K"] * sizes["V"]))
    parts = []
    for chosen in torch.arange(tiles.token.shape[0], device=k.device).split(together):
        update = partial(_tile_updates, tiles, chosen, size)
        parts.append(checkpoint(update, *signals, use_reentrant=False, preserve_rng_state=False))
    updates = DiagonalUpdate(*(torch.cat(x) for x in zip(*parts, strict=True)))
    return _combine_tiles(updates, tiles, belief)


def _tile_updates(tiles: Tiles, chosen: Tensor, size: int, *signals: Tensor) -> DiagonalUpdate:
    """Return the updates of the tiles `chosen`, `[P, G, K, V]`."""
    position = torch.arange(size, device=chosen.device)
    inside = position < tiles.count[chosen][:, None]  # [P, L]
    index = torch.where(inside, tiles.token[chosen][:, None] + position, 0)
    k, v, precision, decay, noise = (x if x.ndim == 3 else x.flatten(0, 1)[index] for x in signals)
    inside = inside[..., None, None, None]
    weighted_key = torch.where(inside, k[..., None] * precision[..., None, :], 0.0)
    information, information_mean = weighted_key * k[..., None], weighted_key * v[..., None, :]
    decay, noise = torch.where(inside, decay, 1.0), torch.where(inside, noise, 0.0)
    information_mean = torch.where(inside, information_mean, 0.0)
    shrinkage = 1 / (1 + information * noise)
    factor, var = decay * shrinkage, noise * shrinkage
    updates = DiagonalUpdate(
        factor, decay * factor * information, factor * information_mean, var * information_mean, var
    )
    while updates.mean.shape[1] > 1:
        early, late = (DiagonalUpdate(*(x[:, half::2] for x in updates)) for half in (0, 1))
        updates = early.then(late)
    return DiagonalUpdate(*(x[:, 0] for x in updates))


def _combine_tiles(updates: DiagonalUpdate, tiles: Tiles, belief: DiagonalBelief) -> DiagonalUpdate:
    """Combine the updates of the tiles of each sequence, in log2(P) steps."""
    count, index = updates.mean.shape[0], torch.arange(updates.mean.shape[0], device=updates.mean.device)
    distance = 1
    while distance < count:
        before = (index - distance).clamp(min=0)
        together = (index >= distance) & (tiles.sequence[before] == tiles.sequence)
        combined = updates.take(before).then(updates)
        updates = _select(together, combined, updates)
        distance *= 2
    return _select(tiles.last >= 0, updates.take(tiles.last.clamp(min=0)), DiagonalUpdate.identity(belief))


def _select(condition: Tensor, yes: DiagonalUpdate, no: DiagonalUpdate) -> DiagonalUpdate:
    condition = condition.view(-1, 1, 1, 1)
    return DiagonalUpdate(*(torch.where(condition, x, y) for x, y in zip(yes, no, strict=True)))
