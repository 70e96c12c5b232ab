"""Linear diffusions seen through noise: a variance in closed form, and trajectories drawn from a filter's beliefs."""

from __future__ import annotations

import torch
from torch import Tensor


def riccati(rate: Tensor, lag: Tensor, process_noise: Tensor, obs_noise: Tensor, start: Tensor | float = 0.0) -> Tensor:
    """The variance of dx = -rate x dt + dw after being watched for a time: V' = -2 rate V + s^2 - V^2 / r.

    Adaptive Filter Attention, appendix A.3, its misprint mended: with b = sqrt(rate^2 + s^2 / r), u = tanh(b lag) / b,
    V = (V_0 + u (s^2 - rate V_0)) / (1 + u (rate + V_0 / r)). Where V_0 = 0 that is the paper's form,
    r (b tanh(b lag - atanh(-rate / b)) - rate), without its cancellation, and it is right at b = 0. The precision is
    1 / V. Complex modes have the same.

    Args:
        rate: a >= 0, of decay per unit of time.
        lag: time since the variance was `start`, >= 0.
        process_noise: s^2, per unit of time.
        obs_noise: r > 0, the variance times the time of the measurements: n a unit of time of variance n r, n large.
        start: V_0 >= 0.

    All broadcast.
    """
    settled = (rate.square() + process_noise / obs_noise).sqrt()
    angle = settled * lag
    seen = torch.where(angle > 0, lag * torch.tanh(angle) / torch.where(angle > 0, angle, 1.0), lag)
    return (start + seen * (process_noise - rate * start)) / (1 + seen * (rate + start / obs_noise))


def sample_backwards(
    mean: Tensor,
    covariance: Tensor,
    transition: Tensor,
    noise: Tensor,
    count: int = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw trajectories given all measurements, from what was believed after each (Adaptive Filter Attention, B.1).

    From the last belief backwards: x_T is drawn from it, then x_t from the belief at t given that the transition led
    to x_{t+1}. They have the mean and covariance of the Rauch-Tung-Striebel smoother, and those between times, too.

    Args:
        mean: `[..., T, d]` of the filter after each token, T >= 1.
        covariance: `[..., T, d, d]` of it, positive semi-definite.
        transition: `[..., T - 1, d, d]`: x_{t+1} is transition_t x_t and noise.
        noise: `[..., T - 1, d, d]`, its covariance, positive semi-definite.
        count: n, trajectories.

    Returns:
        `[n, ..., T, d]`. Complexity: O(T d^3), T steps one after the other, and O(n T d^2). A complex mode is two rows.
    """
    drawn = torch.randn(count, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
    after = mean[..., -1, :] + _apply(root(covariance[..., -1, :, :]), drawn[..., -1, :])
    path = [after]
    for t in range(mean.shape[-2] - 2, -1, -1):
        move, belief = transition[..., t, :, :], covariance[..., t, :, :]
        crossed = move @ belief
        # the predicted covariance is singular where the state is certain: what it cannot tell apart stays as it is
        gain = (torch.linalg.pinv(crossed @ move.mT + noise[..., t, :, :], hermitian=True) @ crossed).mT
        # in Joseph's form, so that what is left stays positive
        kept = torch.eye(mean.shape[-1]).to(mean) - gain @ move
        left = kept @ belief @ kept.mT + gain @ noise[..., t, :, :] @ gain.mT
        surprise = after - _apply(move, mean[..., t, :])
        after = mean[..., t, :] + _apply(gain, surprise) + _apply(root(left), drawn[..., t, :])
        path.append(after)
    return torch.stack(path[::-1], -2)


def _apply(matrix: Tensor, x: Tensor) -> Tensor:
    return (matrix @ x[..., None])[..., 0]


def root(covariance: Tensor) -> Tensor:
    """Some R with R R' = a covariance that may be singular."""
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp(min=0).sqrt()[..., None, :]
