"""Tiles of tokens once the beliefs before them are known: the filter, exact and parallel inside, and its adjoint.

What a tile sees is Gaussian, with a covariance C = L L' whose factor replaces the recursion over tokens: row t of
L^{-1} (v - keys mean) is the surprise of token t given those before it, and what is read or left moves along it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.ops._dense.joseph import corrected, less, symmetric
from kalmix.ops._dense.tile_statistics import Outlook, slope, turn
from kalmix.ops._shared.triangular import lower, solve_lower

State = tuple[Tensor, Tensor]  # means [n, K, V] and covariances [n, K, K] of heads, or the adjoints of these


class Tile(NamedTuple):
    """R tiles and the beliefs before them."""

    mean: Tensor  # [R, K, V]
    covariance: Tensor  # [R, K, K]
    warped: Tensor  # [R, K, L], covariance keys'
    whiten: Tensor  # [R, L, L], L^{-1}
    surprise: Tensor  # [R, L, V], independent, of variance 1 a column
    gain: Tensor  # [R, K, L], of the state after the tile, along surprise


class Crossing(NamedTuple):
    """How the adjoint of a belief crosses R tiles: with F the filter's own transition,
    dM = F' dM' + mean and dP = F' dP' F + F' dM' mixed' + covariance, made symmetric."""

    transition: Tensor  # [R, K, K], F
    mixed: Tensor  # [R, K, V]
    mean: Tensor  # [R, K, V]
    covariance: Tensor  # [R, K, K]

    def __call__(self, after: State) -> State:
        back = self.transition.mT
        to_mean = back @ after[0]
        to_covariance = torch.baddbmm(self.covariance, to_mean, self.mixed.mT)
        to_covariance = torch.baddbmm(to_covariance, back @ after[1], self.transition)
        return to_mean + self.mean, symmetric(to_covariance)


def meet(outlook: Outlook, v: Tensor, before: State) -> Tile:
    """The filter over R tiles side by side."""
    mean, covariance = before
    warped = covariance @ outlook.keys.mT
    whiten = _whitening(torch.baddbmm(outlook.seen, outlook.keys, warped))
    gain = torch.addcmul(outlook.left, outlook.decay, warped) @ whiten.mT
    surprise = whiten @ torch.baddbmm(v, outlook.keys, mean, alpha=-1)
    return Tile(mean, covariance, warped, whiten, surprise, gain)


def leave(outlook: Outlook, tile: Tile) -> State:
    """The beliefs after R tiles."""
    return turned(_after(outlook, tile), outlook.turn)


def gains(outlook: Outlook, tile: Tile) -> Tensor:
    """Of what is read, along surprise, `[R, L, L]`, lower triangular."""
    return lower(torch.baddbmm(outlook.read, outlook.queries, tile.warped) @ tile.whiten.mT)


def gains_back(tile: Tile, to_mean: Tensor) -> Tensor:
    """The adjoint of `gains` from that of the mean."""
    return lower(to_mean @ tile.surprise.mT)


def variance_of(outlook: Outlook, tile: Tile, gains: Tensor) -> Tensor:
    """Of what is read, `[R, L, 1]`; without process noise a sum of squares."""
    gains = gains @ tile.whiten
    read = outlook.queries - gains @ outlook.keys
    spread = (read @ tile.covariance * read).sum(-1, keepdim=True)
    spread += outlook.spread + (gains * (gains @ outlook.seen - 2 * outlook.read)).sum(-1, keepdim=True)
    return spread.clamp(min=0)  # rounding


def crossing(
    outlook: Outlook, tile: Tile, gains: Tensor, by_read: Tensor, to_mean: Tensor, to_variance: Tensor
) -> Crossing:
    """From the adjoints of what is read, `[R, L, V]` and `[R, L, 1]`; `by_read` is `gains_back`."""
    seen = tile.whiten @ outlook.keys
    read = torch.baddbmm(
        outlook.queries, gains, seen, alpha=-1
    )  # how what is read moves with the belief before the tile
    transition = torch.baddbmm(torch.diag_embed(outlook.decay.squeeze(-1)), tile.gain, seen, alpha=-1)
    along = torch.addcmul(by_read @ seen, to_variance, read)
    return Crossing(transition, seen.mT @ tile.surprise, read.mT @ to_mean, read.mT @ along)


def pull_back(
    outlook: Outlook, tile: Tile, gains: Tensor, by_read: Tensor, to_mean: Tensor, to_variance: Tensor, after: State
) -> tuple[Outlook, Tensor]:
    """The adjoints of outlooks and of values, from those of what is read and of the beliefs after (before they turn).

    It takes no derivative of the factorisation: gains are the best there are, so that to first order what they weigh
    does not move with them.
    """
    to_state, to_covariance = after
    by_left = to_state @ tile.surprise.mT
    of_read, of_left = to_variance * gains, to_covariance @ tile.gain
    to_seen = torch.baddbmm(gains.mT @ (of_read - by_read), tile.gain.mT, of_left - by_left)
    to_seen = tile.whiten.mT @ symmetric(to_seen) @ tile.whiten
    to_read, to_left = (torch.sub(by, of, alpha=2) @ tile.whiten for by, of in ((by_read, of_read), (by_left, of_left)))
    to_v = tile.whiten.mT @ torch.baddbmm(gains.mT @ to_mean, tile.gain.mT, to_state)

    by_keys = torch.baddbmm((outlook.decay * to_left).mT, to_read.mT, outlook.queries)
    by_keys = torch.baddbmm(by_keys, to_seen, outlook.keys, alpha=2)
    by_queries = torch.addcmul(to_read @ outlook.keys, to_variance, outlook.queries, value=2)
    by_means = (to_state * tile.mean).sum(-1, keepdim=True) + (to_left * tile.warped).sum(-1, keepdim=True)
    to_turn = None
    if outlook.turn is not None:
        mean, covariance = _after(outlook, tile)
        by_turn = slope(to_state, mean), 2 * slope(to_covariance, covariance)
        to_turn = sum(x.sum(-1, keepdim=True) for x in by_turn)
    return Outlook(
        queries=torch.baddbmm(by_queries @ tile.covariance, to_mean, tile.mean.mT),
        keys=torch.baddbmm(by_keys @ tile.covariance, to_v, tile.mean.mT, alpha=-1),
        decay=torch.baddbmm(by_means, to_covariance * tile.covariance, outlook.decay, alpha=2),
        seen=to_seen,
        read=to_read,
        spread=to_variance,
        left=to_left,
        noise=to_covariance,
        turn=to_turn,  # type: ignore[arg-type]
    ), to_v


def turned(state: State, angle: Tensor | None) -> State:
    """Beliefs, or adjoints of them, with every pair of rows turned."""
    if angle is None:
        return state
    return turn(state[0], angle), symmetric(turn(turn(state[1], angle).mT, angle))


def _after(outlook: Outlook, tile: Tile) -> State:
    """The beliefs after the tiles, before they turn."""
    gain, decay = tile.gain @ tile.whiten, outlook.decay
    moved = less(decay * tile.covariance, gain, tile.warped.mT)
    covariance = less(torch.addcmul(outlook.noise, moved, decay.mT), gain, outlook.left.mT)
    covariance = corrected(covariance, moved, outlook.left, gain, outlook.keys, outlook.seen)
    return torch.baddbmm(decay * tile.mean, tile.gain, tile.surprise), covariance


def _whitening(seen: Tensor) -> Tensor:
    """The inverse of the lower Cholesky factor of `[..., L, L]`.

    Where rounding leaves no factor, since the noise is less than the dtype resolves beside the belief's variance, the
    noise is raised to that. What has no factor even so tells nothing.
    """
    factor, failed = torch.linalg.cholesky_ex(seen)
    eye = torch.eye(seen.shape[-1], dtype=seen.dtype, device=seen.device)
    if seen.device.type == "cpu" and not failed.any():
        return solve_lower(factor, eye)
    resolved = len(eye) * (len(eye) + 1) * torch.finfo(seen.dtype).eps  # Higham, Accuracy and Stability, theorem 10.7
    raised, lost = torch.linalg.cholesky_ex(seen + resolved * eye * seen)
    failed, lost = (failed > 0)[..., None, None], ((failed > 0) & (lost > 0))[..., None, None]
    factor = torch.where(lost, eye, torch.where(failed, raised, factor))
    return torch.where(lost, 0, solve_lower(factor, eye))
