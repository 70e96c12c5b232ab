"""Systems move, are sampled and are seen as they say; item by item against a definition written out here."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kalmix import ArgumentError
from kalmix_bench.datasets.sde.co2 import series, windows
from kalmix_bench.datasets.sde.scores import LEVELS, coverage, fit_scale
from kalmix_bench.datasets.sde.systems import SPIRAL, System, drift_from_eigenvalues
from kalmix_bench.datasets.sde.trajectories import Sampling, embedding, simulate, splits
from kalmix_bench.experiments.sde.calibration import MODE, calibration, estimate
from kalmix_bench.experiments.sde.independence import pooled_variances

PAPER = System(SPIRAL, 0.3, 0.5, step=0.01)
DECAYING = System(((-0.1,),), 0.3, 0.5)  # a mode of it, its rotation undone


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def times(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_drift_has_the_given_eigenvalues() -> None:
    made = torch.linalg.eigvals(torch.tensor(drift_from_eigenvalues([-0.1 + 1j, -2.0, 0.5j])))
    want = [-0.1 + 1j, -0.1 - 1j, -2.0, 0.5j, -0.5j]
    assert sorted((round(x.real, 6), round(x.imag, 6)) for x in made.tolist()) == sorted(
        (complex(x).real, complex(x).imag) for x in want
    )
    spiral = torch.linalg.eigvals(torch.tensor(SPIRAL, dtype=torch.float64))
    assert {round(x.imag, 9) for x in spiral.tolist()} == {1, -1} and (spiral.real + 0.1).abs().max() < 1e-12


@pytest.mark.parametrize(
    "drift",
    [SPIRAL, drift_from_eigenvalues([0.0, 2j]), drift_from_eigenvalues([-30.0, 0.4]), ((-1.0, 1e3), (0.0, -1.5))],
)
def test_transitions_are_those_of_the_equation(drift: tuple[tuple[float, ...], ...]) -> None:
    """e^{A t}, and the integral of s^2 e^{A u} e^{A' u}, by Simpson's rule."""
    system, lag = System(drift, 0.7, 1.0), 1.3
    matrix, covariance = (x[0] for x in system.transition(times(lag)))
    a = torch.tensor(drift, dtype=torch.float64)
    assert torch.allclose(matrix, torch.linalg.matrix_exp(a * lag), rtol=1e-9, atol=1e-9)
    u = torch.linspace(0, lag, 2001, dtype=torch.float64)
    flows = torch.linalg.matrix_exp(a * u[:, None, None])
    weight = torch.ones(2001, dtype=torch.float64)
    weight[1:-1:2], weight[2:-1:2] = 4, 2
    integral = 0.7 * lag / 6000 * torch.einsum("u,uij,ukj->ik", weight, flows, flows)
    assert (covariance - integral).abs().max() < 1e-6 * integral.abs().max()


def test_transitions_compose() -> None:
    for system in (PAPER, System(SPIRAL, 0.3, 0.5)):
        matrix, covariance = system.transition(times(0, 0.2, 0.5, 0.7))
        assert torch.equal(covariance[0], torch.zeros(2, 2).double())
        assert torch.allclose(matrix[0], torch.eye(2).double(), atol=1e-14)
        assert torch.allclose(matrix[3], matrix[2] @ matrix[1], atol=1e-12)
        assert torch.allclose(covariance[3], matrix[2] @ covariance[1] @ matrix[2].mT + covariance[2], atol=1e-12)


def test_eulers_method_converges_to_the_exact_transition() -> None:
    x, steps = times(3, -1), 10
    for _ in range(steps):
        x = x + 0.01 * torch.tensor(SPIRAL).double() @ x
    matrix, _ = PAPER.transition(times(0.1))
    assert torch.allclose(matrix[0] @ times(3, -1), x, atol=1e-12)
    exact = System(SPIRAL, 0.3, 0.5).transition(times(1))
    errors = [
        max(float((got - want).abs().max()) for got, want in zip(system.transition(times(1)), exact, strict=True))
        for system in (System(SPIRAL, 0.3, 0.5, step=h) for h in (0.01, 0.001))
    ]
    assert 9 < errors[0] / errors[1] < 11
    with pytest.raises(ArgumentError, match="whole multiples"):
        PAPER.transition(times(0.105))


@pytest.mark.parametrize("sampling", [Sampling(12, 0.5), Sampling(12, 0.5, irregular=True)])
def test_trajectories_have_the_moments_of_the_system(sampling: Sampling) -> None:
    drawn = simulate(PAPER, sampling, 8000, generator())
    assert drawn.state is not None
    length = drawn.state[:, 0].norm(dim=1)
    assert 17 <= length.min() < 17.1 and 22.9 < length.max() <= 23
    matrix, covariance = PAPER.transition(drawn.times[:, -1])
    pushed = drawn.state[:, -1] - (matrix @ drawn.state[:, 0, :, None])[..., 0]
    whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), pushed[..., None], upper=False)[..., 0]
    noise = (drawn.measurements - drawn.state).flatten(0, 1) / 0.5**0.5
    first = drawn.state[:, 0] / PAPER.prior().diagonal().sqrt()
    for unit in (whitened, noise, first):
        assert (unit.mean(0)).abs().max() < 4 / len(unit) ** 0.5
        assert (unit.mT @ unit / len(unit) - torch.eye(2)).abs().max() < 6 / len(unit) ** 0.5


def test_times_are_regular_or_come_at_random_on_whole_steps() -> None:
    regular = simulate(PAPER, Sampling(), 2, generator()).times
    assert torch.allclose(regular, torch.arange(102).double() / 10) and regular.shape == (2, 102)
    irregular = simulate(PAPER, Sampling(irregular=True), 50, generator()).times
    assert irregular.diff(dim=1).min() >= 0 and irregular[0, 1] != irregular[1, 1]
    assert ((irregular * 100).round() - irregular * 100).abs().max() < 1e-9
    assert irregular.diff(dim=1).mean() == pytest.approx(0.1, rel=0.1)


def test_outliers_have_the_given_rate_and_scale() -> None:
    drawn = simulate(PAPER, Sampling(outliers=0.12, outlier_scale=20), 400, generator())
    assert drawn.state is not None and drawn.is_outlier is not None
    assert not drawn.is_outlier[:, 0].any()
    assert drawn.is_outlier[:, 1:].double().mean() == pytest.approx(0.12, abs=0.01)
    off = (drawn.measurements - drawn.state).square()
    assert off[drawn.is_outlier].mean() == pytest.approx(400 * 0.5, rel=0.05)
    assert off[~drawn.is_outlier].mean() == pytest.approx(0.5, rel=0.02)


def test_splits_do_not_depend_on_their_sizes() -> None:
    one, other = splits(PAPER, Sampling(), (4, 3, 2), 7), splits(PAPER, Sampling(), (9, 3, 2), 7)
    assert torch.equal(one.test.measurements, other.test.measurements)
    assert torch.equal(one.validation.measurements, other.validation.measurements)
    firsts = [x.measurements[0, 0].tolist() for seed in (7, 8) for x in splits(PAPER, Sampling(), (1, 1, 1), seed)]
    assert len({tuple(first) for first in firsts}) == 6


def test_an_embedding_is_orthonormal() -> None:
    rows = embedding(2, 128, 0)
    assert torch.allclose(rows @ rows.mT, torch.eye(2).double(), atol=1e-14)
    with pytest.raises(ArgumentError, match="at least 3"):
        embedding(3, 2, 0)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: System(((1.0, 2.0),), 1, 1), "drift"),
        (lambda: System(((0.0, 1.0), (0.0, 0.0)), 1, 1).transition(times(1)), "drift"),
        (lambda: System(SPIRAL, -1, 1), "process_noise"),
        (lambda: System(SPIRAL, 1, math.nan), "obs_noise"),
        (lambda: Sampling(0), "length"),
        (lambda: Sampling(interval=0), "interval"),
        (lambda: Sampling(outliers=1.5), "outliers"),
        (lambda: pooled_variances(PAPER, times(0, 1)), "system"),
        (lambda: windows(9, 8), "length"),
        (lambda: windows(9, 500), "span"),
    ],
)
def test_invalid_arguments_raise(make, name: str) -> None:
    with pytest.raises(ArgumentError, match=f"`{name}`"):
        make()


def test_without_process_noise_pooling_is_a_kalman_filter() -> None:
    found = pooled_variances(System(((-0.3,),), 0.0, 0.5), times(0, 0.5, 0.5, 2, 7))
    assert torch.allclose(found.claimed, found.optimal, rtol=1e-12)
    assert torch.allclose(found.actual, found.optimal, rtol=1e-12)


def test_the_error_of_pooling_equals_its_simulation() -> None:
    """Against simulation, and the optimum against generalised least squares."""
    at = Sampling(12, 0.5, irregular=True).times(1, generator())[0]
    found = pooled_variances(DECAYING, at)
    matrix, covariance = (x[..., 0, 0] for x in DECAYING.transition((at[-1] - at).clamp(min=0)))
    own = DECAYING.obs_noise * matrix.square()
    index = torch.arange(12)
    joint = covariance[torch.maximum(index[:, None], index)] + own.diag()
    assert found.optimal[-1] == pytest.approx(1 / float(torch.linalg.inv(joint).sum()), rel=1e-9)

    count = 40_000
    state = torch.zeros(count, dtype=torch.float64)
    seen = []
    steps = zip(*(x[:, 0, 0].tolist() for x in DECAYING.transition(at.diff(prepend=at[:1]))), strict=True)
    for move, variance in steps:
        state = move * state + variance**0.5 * torch.randn(count, generator=generator(len(seen))).double()
        seen.append(state + DECAYING.obs_noise**0.5 * torch.randn(count, generator=generator(99 + len(seen))).double())
    weights = 1 / (covariance + own)
    estimate = (weights * matrix) @ torch.stack(seen) / weights.sum()
    assert (estimate - state).square().mean() == pytest.approx(float(found.actual[-1]), rel=0.03)


def test_pooling_is_worse_than_the_optimum_and_overconfident() -> None:
    """The paper's mode, after its 102 measurements; the figures of docs/results/sde.md."""
    found = pooled_variances(DECAYING, torch.arange(102).double() / 10)
    assert found.actual[-1] / found.optimal[-1] == pytest.approx(4.98, abs=0.01)
    assert found.actual[-1] / found.claimed[-1] == pytest.approx(53.2, abs=0.1)
    assert (found.actual / found.optimal).mean() == pytest.approx(3.03, abs=0.01)
    assert (found.actual[1:] > found.claimed[1:]).all()


def test_a_fitted_scale_covers_held_out_errors() -> None:
    """Gaussian errors have a variance 53 times larger than claimed."""
    held_out, test = (torch.randn(2000, 2, generator=generator(seed)).double() for seed in (0, 1))
    claimed = torch.full((2000,), 1 / 53, dtype=torch.float64)
    assert max(coverage(test, claimed)) < 0.25
    scale = fit_scale(held_out, claimed)
    assert scale == pytest.approx(53, rel=0.1)
    by_place = fit_scale(held_out.view(500, 4, 2), claimed.view(500, 4), dim=0)
    assert by_place.shape == (4,) and by_place.mean() == pytest.approx(float(scale), rel=1e-9)
    assert coverage(test, scale * claimed) == pytest.approx(LEVELS, abs=0.02)


def test_attention_equals_the_pooled_estimate_and_a_fitted_scale_calibrates_it() -> None:
    system = System(drift_from_eigenvalues([MODE]), 0.3, 0.5)
    drawn = simulate(system, Sampling(irregular=True), 2, generator())
    believed = estimate(system, drawn)
    for one in range(2):
        claimed = pooled_variances(replace(system, drift=((MODE.real,),)), drawn.times[one]).claimed
        assert torch.allclose(believed.covariance[one, :, 1, 1], claimed, rtol=1e-6)
    covered = calibration(0.3, 0.5, trajectories=100)
    assert covered["claimed"][2] < 0.45  # coverage of the 90% interval
    assert covered["kalman"] == pytest.approx(LEVELS, abs=0.02)
    assert covered["one scale"][2] == pytest.approx(0.9, abs=0.03) and covered["one scale, late"][2] < 0.82
    for whose in ("a scale a token", "a scale a token, late"):
        assert covered[whose] == pytest.approx(LEVELS, abs=0.04)


def test_windows_of_different_splits_do_not_overlap() -> None:
    at, ppm = series()
    assert len(at) == 2225 and at[-1] == pytest.approx(43.75, abs=0.01) and ppm[0] == pytest.approx(316.1)
    assert at.diff().max() > 0.3  # gaps
    parts = windows()
    assert [len(part.times) for part in parts] == [179, 26, 26]
    for part in parts:
        assert part.measurements.shape == (len(part.times), 64, 1)
        assert not part.times[:, 0].any() and not part.measurements[:, 0].any()
        assert part.times.diff(dim=1).min() > 0.01
        assert 1 < part.times.diff(dim=1).max() / part.times.diff(dim=1).min() < 30
    assert parts.train.measurements.std() == pytest.approx(1, abs=0.02)
    assert not torch.equal(parts.train.times[0], parts.train.times[1])
