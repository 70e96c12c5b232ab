"""Filter update of tiles, given the beliefs before them, and its adjoint.

The observations of a tile are Gaussian with covariance C = L L'. The Cholesky factor replaces the recursion over
tokens: row t of L^{-1} (v - keys mean) is the normalised innovation of token t given the tokens before it, and
read-outs and final states are linear in these innovations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.ops._dense.joseph import joseph_update, subtract_product, symmetrize
from kalmix.ops._dense.tile_statistics import TileStatistics, rotate, rotation_angle_grad
from kalmix.ops._shared.triangular import lower_triangle, solve_lower_triangular

State = tuple[Tensor, Tensor]  # means [n, K, V] and covariances [n, K, K], or their adjoints


class TileUpdate(NamedTuple):
    """Update of R tiles, with the beliefs before them."""

    mean: Tensor  # [R, K, V]
    covariance: Tensor  # [R, K, K]
    cov_keys: Tensor  # [R, K, L], covariance keys'
    whitening: Tensor  # [R, L, L], L^{-1}
    innovation: Tensor  # [R, L, V], normalised: independent, with variance 1 in each column
    gain: Tensor  # [R, K, L], of the final state with respect to the innovations


class BackwardMap(NamedTuple):
    """Affine map of the adjoint of a belief across R tiles.

    With F the transition of the filter, dM = F' dM' + mean and dP = F' dP' F + F' dM' mean_coefficient' + covariance,
    made symmetric.
    """

    transition: Tensor  # [R, K, K], F
    mean_coefficient: Tensor  # [R, K, V]
    mean: Tensor  # [R, K, V]
    covariance: Tensor  # [R, K, K]

    def __call__(self, grad_after: State) -> State:
        transition_t = self.transition.mT
        grad_mean = transition_t @ grad_after[0]
        grad_covariance = torch.baddbmm(self.covariance, grad_mean, self.mean_coefficient.mT)
        grad_covariance = torch.baddbmm(grad_covariance, transition_t @ grad_after[1], self.transition)
        return grad_mean + self.mean, symmetrize(grad_covariance)


def update_tile(stats: TileStatistics, v: Tensor, before: State) -> TileUpdate:
    """Compute the update of R tiles in parallel."""
    mean, covariance = before
    cov_keys = covariance @ stats.keys.mT
    whitening = _inverse_cholesky(torch.baddbmm(stats.obs_cov, stats.keys, cov_keys))
    gain = torch.addcmul(stats.state_obs_cov, stats.decay, cov_keys) @ whitening.mT
    innovation = whitening @ torch.baddbmm(v, stats.keys, mean, alpha=-1)
    return TileUpdate(mean, covariance, cov_keys, whitening, innovation, gain)


def final_state(stats: TileStatistics, update: TileUpdate) -> State:
    """Return the beliefs after R tiles."""
    return rotate_state(_final_state_unrotated(stats, update), stats.rotation)


def readout_gains(stats: TileStatistics, update: TileUpdate) -> Tensor:
    """Return the gains of the read-outs with respect to the innovations, `[R, L, L]`, lower triangular."""
    return lower_triangle(torch.baddbmm(stats.readout_obs_cov, stats.queries, update.cov_keys) @ update.whitening.mT)


def readout_gains_backward(update: TileUpdate, grad_mean: Tensor) -> Tensor:
    """Return the adjoint of `readout_gains` from that of the mean."""
    return lower_triangle(grad_mean @ update.innovation.mT)


def readout_variance(stats: TileStatistics, update: TileUpdate, gains: Tensor) -> Tensor:
    """Return the variance of the read-outs, `[R, L, 1]`; without process noise, a sum of squares."""
    gains = gains @ update.whitening
    readout = stats.queries - gains @ stats.keys
    variance = (readout @ update.covariance * readout).sum(-1, keepdim=True)
    variance += stats.readout_var + (gains * (gains @ stats.obs_cov - 2 * stats.readout_obs_cov)).sum(-1, keepdim=True)
    return variance.clamp(min=0)  # below 0 only by rounding


def backward_map(
    stats: TileStatistics,
    update: TileUpdate,
    gains: Tensor,
    grad_gains: Tensor,
    grad_mean: Tensor,
    grad_variance: Tensor,
) -> BackwardMap:
    """Return the map of adjoints across R tiles, from the adjoints of mean and variance of the read-outs."""
    whitened_keys = update.whitening @ stats.keys
    readout = torch.baddbmm(stats.queries, gains, whitened_keys, alpha=-1)  # derivative of read-outs by the prior mean
    transition = torch.baddbmm(torch.diag_embed(stats.decay.squeeze(-1)), update.gain, whitened_keys, alpha=-1)
    grad_readout = torch.addcmul(grad_gains @ whitened_keys, grad_variance, readout)
    return BackwardMap(
        transition, whitened_keys.mT @ update.innovation, readout.mT @ grad_mean, readout.mT @ grad_readout
    )


def tile_vjp(
    stats: TileStatistics,
    update: TileUpdate,
    gains: Tensor,
    grad_gains: Tensor,
    grad_mean: Tensor,
    grad_variance: Tensor,
    grad_after: State,
) -> tuple[TileStatistics, Tensor]:
    """Return the adjoints of statistics and values, from those of the read-outs and of the final beliefs.

    Adjoints of the final beliefs are those before rotation.

    The factorisation is not differentiated: gains are optimal, so the outputs do not depend on them to first order.
    """
    grad_state, grad_covariance = grad_after
    grad_state_gain = grad_state @ update.innovation.mT
    var_gains, cov_gain = grad_variance * gains, grad_covariance @ update.gain
    grad_obs_cov = torch.baddbmm(gains.mT @ (var_gains - grad_gains), update.gain.mT, cov_gain - grad_state_gain)
    grad_obs_cov = update.whitening.mT @ symmetrize(grad_obs_cov) @ update.whitening
    grad_readout_obs, grad_state_obs = (
        torch.sub(grad, second, alpha=2) @ update.whitening
        for grad, second in ((grad_gains, var_gains), (grad_state_gain, cov_gain))
    )
    grad_v = update.whitening.mT @ torch.baddbmm(gains.mT @ grad_mean, update.gain.mT, grad_state)

    grad_keys = torch.baddbmm((stats.decay * grad_state_obs).mT, grad_readout_obs.mT, stats.queries)
    grad_keys = torch.baddbmm(grad_keys, grad_obs_cov, stats.keys, alpha=2)
    grad_queries = torch.addcmul(grad_readout_obs @ stats.keys, grad_variance, stats.queries, value=2)
    grad_decay = (grad_state * update.mean).sum(-1, keepdim=True) + (grad_state_obs * update.cov_keys).sum(
        -1, keepdim=True
    )
    grad_rotation = None
    if stats.rotation is not None:
        mean, covariance = _final_state_unrotated(stats, update)
        angle_grads = rotation_angle_grad(grad_state, mean), 2 * rotation_angle_grad(grad_covariance, covariance)
        grad_rotation = sum(x.sum(-1, keepdim=True) for x in angle_grads)
    return TileStatistics(
        queries=torch.baddbmm(grad_queries @ update.covariance, grad_mean, update.mean.mT),
        keys=torch.baddbmm(grad_keys @ update.covariance, grad_v, update.mean.mT, alpha=-1),
        decay=torch.baddbmm(grad_decay, grad_covariance * update.covariance, stats.decay, alpha=2),
        obs_cov=grad_obs_cov,
        readout_obs_cov=grad_readout_obs,
        readout_var=grad_variance,
        state_obs_cov=grad_state_obs,
        noise_cov=grad_covariance,
        rotation=grad_rotation,  # type: ignore[arg-type]
    ), grad_v


def rotate_state(state: State, angle: Tensor | None) -> State:
    """Rotate every pair of rows of beliefs, or of their adjoints."""
    if angle is None:
        return state
    return rotate(state[0], angle), symmetrize(rotate(rotate(state[1], angle).mT, angle))


def _final_state_unrotated(stats: TileStatistics, update: TileUpdate) -> State:
    """Return the beliefs after the tiles, before rotation."""
    gain, decay = update.gain @ update.whitening, stats.decay
    transition_cov = subtract_product(decay * update.covariance, gain, update.cov_keys.mT)
    covariance = subtract_product(
        torch.addcmul(stats.noise_cov, transition_cov, decay.mT), gain, stats.state_obs_cov.mT
    )
    covariance = joseph_update(covariance, transition_cov, stats.state_obs_cov, gain, stats.keys, stats.obs_cov)
    return torch.baddbmm(decay * update.mean, update.gain, update.innovation), covariance


def _inverse_cholesky(innovation_cov: Tensor) -> Tensor:
    """Return the inverse of the lower Cholesky factor of `[..., L, L]`.

    If rounding makes the factorisation fail, because the noise is too small for the dtype, the diagonal is increased
    by the relative bound of Higham (theorem 10.7). If it fails again, the observations of the tile are ignored.
    """
    factor, failed = torch.linalg.cholesky_ex(innovation_cov)
    eye = torch.eye(innovation_cov.shape[-1], dtype=innovation_cov.dtype, device=innovation_cov.device)
    if innovation_cov.device.type == "cpu" and not failed.any():
        return solve_lower_triangular(factor, eye)
    # Higham, Accuracy and Stability of Numerical Algorithms, theorem 10.7
    min_noise = len(eye) * (len(eye) + 1) * torch.finfo(innovation_cov.dtype).eps
    regularized_factor, singular = torch.linalg.cholesky_ex(innovation_cov + min_noise * eye * innovation_cov)
    failed, singular = (failed > 0)[..., None, None], ((failed > 0) & (singular > 0))[..., None, None]
    factor = torch.where(singular, eye, torch.where(failed, regularized_factor, factor))
    return torch.where(singular, 0, solve_lower_triangular(factor, eye))
