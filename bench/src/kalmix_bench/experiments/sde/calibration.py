"""Coverage of the variance of Adaptive Filter Attention, unscaled and scaled to held-out errors."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.ops import attend
from kalmix_bench.datasets.sde.references import Gaussian, kalman
from kalmix_bench.datasets.sde.scores import coverage, fit_scale
from kalmix_bench.datasets.sde.systems import System, drift_from_eigenvalues
from kalmix_bench.datasets.sde.trajectories import Sampling, Trajectories, splits

MODE = -0.1 + 1j  # the paper's eigenvalue; without shear, one complex channel represents the state
UNWEIGHTED = 1e12  # nu so large that residuals do not change weights


def calibration(
    process_noise: float, obs_noise: float, seed: int = 0, trajectories: int = 200
) -> dict[str, list[float]]:
    """Return the coverage of the state by intervals of each level of `LEVELS`, by method; nothing is learned.

    The op has the true decay, rotation and noises. Scales are fitted on separate trajectories: one for all tokens, and
    one
    per position. "late" is the last quarter of the tokens.

    Args:
        process_noise, obs_noise: variances of the system.
        seed: seed of the trajectories.
        trajectories: number of trajectories for fitting, and of test trajectories.
    """
    system = System(drift_from_eigenvalues([MODE]), process_noise, obs_noise)
    data = splits(system, Sampling(), (1, trajectories, trajectories), seed)
    errors, claimed = _missed(data.validation, estimate(system, data.validation))
    one, each = fit_scale(errors, claimed), fit_scale(errors, claimed, dim=0)
    errors, claimed = _missed(data.test, estimate(system, data.test))
    late = slice(-(claimed.shape[1] // 4), None)
    filtered = kalman(system, data.test.times, data.test.measurements).filtered
    return {
        "claimed": coverage(errors, claimed),
        "one scale": coverage(errors, one * claimed),
        "one scale, late": coverage(errors[:, late], one * claimed[:, late]),
        "a scale a token": coverage(errors, each * claimed),
        "a scale a token, late": coverage(errors[:, late], (each * claimed)[:, late]),
        "kalman": coverage(*_missed(data.test, filtered)),
    }


def estimate(system: System, trajectories: Trajectories) -> Gaussian:
    """Return mean and claimed variance of `kalmix.ops.attend` for a known system of one complex mode."""

    def head(*value: float) -> Tensor:
        return torch.tensor([*value], dtype=torch.float64)

    (decay, _), (frequency, _) = system.drift
    z = trajectories.measurements[:, :, None]
    mean, variance, _ = attend(
        *(z, z, z),
        log_decay=head(decay),
        frequency=head(frequency)[None],
        process_noise=head(system.process_noise),
        key_noise=head(system.obs_noise),
        query_noise=head(0.0),
        nu=UNWEIGHTED,
        times=trajectories.times,
        variance=True,
    )
    assert variance is not None
    return Gaussian(mean[:, :, 0], variance[:, :, 0, :, None] * torch.eye(2, dtype=torch.float64))


def _missed(trajectories: Trajectories, believed: Gaussian) -> tuple[Tensor, Tensor]:
    """Return errors `[B, T, d]` and the variance of a component `[B, T]`."""
    assert trajectories.state is not None
    return believed.mean - trajectories.state, believed.covariance[..., 0, 0]
