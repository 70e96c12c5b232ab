"""Kalman filter and smoother against textbook equations and joint Gaussians."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kalmix.analysis.diffusions import sample_backwards
from kalmix_bench.datasets.sde.co2 import windows
from kalmix_bench.datasets.sde.references import Gaussian, kalman
from kalmix_bench.datasets.sde.scores import squared_errors
from kalmix_bench.datasets.sde.structural import structural
from kalmix_bench.datasets.sde.systems import SPIRAL, System, drift_from_eigenvalues
from kalmix_bench.datasets.sde.trajectories import Sampling, simulate

PAPER = System(SPIRAL, 0.3, 0.5, step=0.01)


def textbook(system: System, times: Tensor, measurements: Tensor, noise: Tensor) -> list[Gaussian]:
    """One trajectory: predicted, filtered and smoothed, token by token."""
    eye, mean, covariance = torch.eye(system.dim).double(), torch.zeros(system.dim).double(), system.prior()
    matrix, pushed = system.transition(times.diff())
    predicted, filtered = [], []
    for t in range(len(times)):
        if t:
            mean, covariance = matrix[t - 1] @ mean, matrix[t - 1] @ covariance @ matrix[t - 1].T + pushed[t - 1]
        predicted.append((mean, covariance))
        gain = covariance @ torch.linalg.inv(covariance + noise[t] * eye)
        mean, covariance = mean + gain @ (measurements[t] - mean), covariance - gain @ covariance
        filtered.append((mean, covariance))
    smoothed = filtered[-1:]
    for t in range(len(times) - 2, -1, -1):
        gain = filtered[t][1] @ matrix[t].T @ torch.linalg.inv(predicted[t + 1][1])
        later_mean, later = smoothed[0]
        mean = filtered[t][0] + gain @ (later_mean - predicted[t + 1][0])
        smoothed.insert(0, (mean, filtered[t][1] + gain @ (later - predicted[t + 1][1]) @ gain.T))
    return [Gaussian(*(torch.stack(x) for x in zip(*of, strict=True))) for of in (predicted, filtered, smoothed)]


@pytest.mark.parametrize("system", [PAPER, System(drift_from_eigenvalues([-0.3 + 2j, -1.0]), 0.2, 0.7)])
def test_references_equal_textbook_filters(system: System) -> None:
    """At irregular times, some measurements known to be outliers."""
    drawn = simulate(system, Sampling(20, irregular=True, outliers=0.3), 3, torch.Generator().manual_seed(0))
    assert drawn.is_outlier is not None
    noise = system.obs_noise * torch.where(drawn.is_outlier, 400.0, 1.0)
    found = kalman(system, drawn.times, drawn.measurements, noise)
    for one in range(3):
        wanted = textbook(system, drawn.times[one], drawn.measurements[one], noise[one])
        for got, want in zip(found, wanted, strict=True):
            assert (got.mean[one] - want.mean).abs().max() < 1e-9
            assert (got.covariance[one] - want.covariance).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("process_noise", "obs_noise", "least", "published"), [(0.3, 0.5, 0.6540, 0.661), (0.0, 4.0, 4.192, 4.26)]
)
@pytest.mark.slow
def test_the_optimum_of_the_papers_system(
    process_noise: float, obs_noise: float, least: float, published: float
) -> None:
    """The squared error of the next measurement, a mean over both rows and the 101 predictions of a trajectory.

    The published values are within two standard deviations of the mean of 32 trajectories, each 1.8% of it.
    """
    system = replace(PAPER, process_noise=process_noise, obs_noise=obs_noise)
    drawn = simulate(system, Sampling(), 400, torch.Generator().manual_seed(0))
    predicted = kalman(system, drawn.times, drawn.measurements).predicted
    claimed = predicted.covariance[:, 1:].diagonal(dim1=-2, dim2=-1).mean() + obs_noise
    assert claimed == pytest.approx(least, rel=1e-3)
    error = (predicted.mean - drawn.measurements)[:, 1:].square().mean()
    assert error == pytest.approx(least, rel=0.02)
    assert published == pytest.approx(least, rel=2 * 0.018)


def test_errors_decrease_with_more_information() -> None:
    drawn = simulate(PAPER, Sampling(outliers=0.12), 50, torch.Generator().manual_seed(0))
    assert drawn.state is not None and drawn.is_outlier is not None
    told = PAPER.obs_noise * torch.where(drawn.is_outlier, 400.0, 1.0)
    plain, knowing = (kalman(PAPER, drawn.times, drawn.measurements, noise) for noise in (None, told))
    plain_error, *others = (float((of.mean - drawn.state)[:, 1:].square().mean()) for of in (plain.filtered, *knowing))
    assert others == sorted(others, reverse=True)
    assert plain_error > 10 * others[1]


@pytest.mark.slow
def test_a_structural_model_of_carbon_dioxide_beats_the_last_measurement() -> None:
    """And no measurement to come, nor its own, is in a prediction."""
    seen = windows().test.select(torch.tensor([0, 20]))
    predicted = structural(seen)
    assert (
        squared_errors(predicted, seen)["measurement"]
        < 0.5 * squared_errors(seen.measurements[:, :-1], seen)["measurement"]
    )
    changed = seen.measurements.clone()
    changed[:, 30:] += 1
    other = structural(seen._replace(measurements=changed))
    assert torch.allclose(other[:, :30], predicted[:, :30]) and (other[:, 30] - predicted[:, 30]).abs().min() > 0.1


def test_drawing_backwards_gives_the_smoothers_trajectories() -> None:
    """Means, covariances and those between times, against the joint Gaussian of all states, conditioned."""
    system, count = System(SPIRAL, 0.3, 0.5, start=(1.0, 2.0)), 40_000
    drawn = simulate(system, Sampling(5, 0.7, irregular=True), 2, torch.Generator().manual_seed(0))
    matrix, pushed = system.transition(drawn.times.diff(dim=1))
    known = kalman(system, drawn.times, drawn.measurements)
    paths = sample_backwards(*known.filtered, matrix, pushed, count, torch.Generator().manual_seed(1))
    assert paths.shape == (count, 2, 5, 2)
    for one in range(2):
        joint, spread = torch.zeros(10, 10).double(), system.prior()
        for t in range(5):
            if t:
                move = matrix[one, t - 1]
                spread = move @ spread @ move.T + pushed[one, t - 1]
            across = spread
            for s in range(t, 5):
                if s > t:
                    across = matrix[one, s - 1] @ across
                joint[2 * s : 2 * s + 2, 2 * t : 2 * t + 2] = across
                joint[2 * t : 2 * t + 2, 2 * s : 2 * s + 2] = across.T
        gain = joint @ torch.linalg.inv(joint + 0.5 * torch.eye(10))
        mean, covariance = gain @ drawn.measurements[one].flatten(), joint - gain @ joint
        assert (known.smoothed.mean[one].flatten() - mean).abs().max() < 1e-9
        scale = covariance.diagonal().sqrt()
        path = (paths[:, one].flatten(1) - mean) / scale
        assert path.mean(0).abs().max() < 4.5 / count**0.5
        assert (path.mT @ path / count - covariance / scale / scale[:, None]).abs().max() < 6 / count**0.5


def test_drawing_backwards_from_certainty_follows_the_transition() -> None:
    """Without process noise there is one trajectory through each last state."""
    system = System(SPIRAL, 0.0, 0.5)
    drawn = simulate(system, Sampling(6), 1, torch.Generator().manual_seed(0))
    matrix, pushed = system.transition(drawn.times.diff(dim=1))
    filtered = kalman(system, drawn.times, drawn.measurements).filtered
    paths = sample_backwards(*filtered, matrix, pushed, 3, torch.Generator().manual_seed(1))
    assert ((matrix @ paths[..., :-1, :, None])[..., 0] - paths[..., 1:, :]).abs().max() < 1e-6
    assert (paths[0] - paths[1]).abs().max() > 0.1
