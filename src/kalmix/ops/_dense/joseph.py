"""Covariance update in Joseph form, used by the kernels in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.ops._shared.products import product


def joseph_update(
    covariance: Tensor,
    transition_cov: Tensor,
    noise_cross_cov: Tensor | None,
    gain: Tensor,
    keys: Tensor,
    noise: Tensor,
) -> Tensor:
    """Return the symmetric posterior covariance, corrected for the rounding of the gain.

    With F = A - g keys, and w and e the noises of state and observations, it is Joseph's form F P F' + Cov(w - g e).
    For an exact gain the correction is 0. Without it, rounding leaves negative and asymmetric entries after nearly
    certain observations, and later updates amplify them.

    Args:
        covariance: `[..., K, K]`, F P A' + Cov(w - g e, w).
        transition_cov: `[..., K, K]`, F P.
        noise_cross_cov: `[..., K, L]`, Cov(w, e); `None` for 0.
        gain: `[..., K, L]`, g.
        keys: `[..., L, K]`.
        noise: `[..., L, L]`, Cov(e).
    """
    if noise_cross_cov is None:
        cross_cov = product(transition_cov, keys.mT)
    else:
        cross_cov = torch.baddbmm(noise_cross_cov, transition_cov, keys.mT)
    cross_cov = subtract_product(cross_cov, gain, noise)
    return symmetrize(subtract_product(covariance, cross_cov, gain.mT))


def subtract_product(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return x - left right for `[..., K, L]` times `[..., L, *]`; several batch axes only for L = 1."""
    if left.shape[-1] == 1:
        return torch.addcmul(x, left, right, value=-1)  # faster than a matrix product
    return torch.baddbmm(x, left, right, alpha=-1)


def symmetrize(x: Tensor) -> Tensor:
    """Return the symmetric part of `[..., K, K]`."""
    return (x + x.mT) / 2
