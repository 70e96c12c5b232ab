"""Filter variance of a diffusion in closed form against its differential equation and limits; posterior samples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kalmix import ArgumentError
from kalmix.analysis.diffusions import riccati, sample_backwards

F64 = torch.float64


@pytest.mark.parametrize("start", [0.0, 0.3, 5.0])
@pytest.mark.parametrize(("rate", "process"), [(0.4, 0.7), (0.0, 0.7), (0.4, 0.0), (0.0, 0.0)])
def test_riccati_solves_its_equation(rate: float, process: float, start: float) -> None:
    """By classical Runge-Kutta steps of 1e-3."""
    noise, step, value = 0.5, 1e-3, torch.tensor(start, dtype=F64)

    def slope(v: torch.Tensor) -> torch.Tensor:
        return -2 * rate * v + process - v.square() / noise

    for _ in range(1500):
        a = slope(value)
        b = slope(value + step / 2 * a)
        c = slope(value + step / 2 * b)
        d = slope(value + step * c)
        value = value + step / 6 * (a + 2 * b + 2 * c + d)
    given = (torch.tensor(x, dtype=F64) for x in (rate, 1.5, process, noise))
    assert riccati(*given, start) == pytest.approx(float(value), rel=1e-9, abs=1e-12)


@pytest.mark.slow
def test_riccati_equals_paper_and_frequent_filter() -> None:
    rate, process, noise = (torch.tensor(x, dtype=F64) for x in (0.4, 0.7, 0.5))
    lag = torch.tensor([0.0, 0.01, 1.5, 1e4], dtype=F64)
    settled = (rate.square() + process / noise).sqrt()
    printed = noise * (settled * torch.tanh(settled * lag - torch.atanh(-rate / settled)) - rate)
    assert torch.allclose(riccati(rate, lag, process, noise), printed, atol=1e-12)
    variance, step = torch.zeros((), dtype=F64), 1e-4
    for _ in range(15_000):
        variance = variance * (1 - 2 * step * rate) + step * process
        variance = 1 / (1 / variance + step / noise)
    assert riccati(rate, lag, process, noise)[2] == pytest.approx(float(variance), rel=1e-3)


def test_gradients_are_finite_without_decay_or_lag() -> None:
    rate, process, lag = (torch.tensor([0.0, 0.5, 0.0], dtype=F64, requires_grad=True) for _ in range(3))
    riccati(rate, lag, process + 0.1, torch.tensor(0.5, dtype=F64)).sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (rate, process, lag))


def test_samples_have_the_smoothers_mean_and_covariance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path is affine in what is drawn, so it is given 0, then each unit vector: no statistics, 1e-10."""
    length, width, draw = 4, 2, torch.Generator().manual_seed(0)
    move = torch.linalg.qr(torch.randn(length - 1, width, width, generator=draw, dtype=F64)).Q * 0.9
    factor = torch.randn(length, width, width, generator=draw, dtype=F64)
    pushed, prior, seen = factor[1:] @ factor[1:].mT, factor[0] @ factor[0].mT, 0.3 * torch.eye(width, dtype=F64)
    measured = torch.randn(length, width, generator=draw, dtype=F64)
    means, covariances = filtered(move, pushed, prior, seen, measured)

    size = length * width
    units = torch.cat([torch.zeros(1, size, dtype=F64), torch.eye(size, dtype=F64)]).view(-1, length, width)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randn", lambda *shape, **_: units.view(shape))
        paths = sample_backwards(means, covariances, move, pushed, count=size + 1).flatten(1)
    root = (paths[1:] - paths[0]).mT

    joint = torch.zeros(size, size, dtype=F64)
    spread = prior
    for t in range(length):
        spread = spread if t == 0 else move[t - 1] @ spread @ move[t - 1].mT + pushed[t - 1]
        across = spread
        for s in range(t, length):
            across = across if s == t else move[s - 1] @ across
            joint[width * s : width * (s + 1), width * t : width * (t + 1)] = across
            joint[width * t : width * (t + 1), width * s : width * (s + 1)] = across.mT
    gain = torch.linalg.solve(joint + torch.block_diag(*[seen] * length), joint).mT
    torch.testing.assert_close(paths[0], gain @ measured.flatten(), rtol=0, atol=1e-10)
    torch.testing.assert_close(root @ root.mT, joint - gain @ joint, rtol=0, atol=1e-10)


def filtered(move: Tensor, pushed: Tensor, prior: Tensor, seen: Tensor, measured: Tensor) -> tuple[Tensor, Tensor]:
    """Means and covariances after each measurement, by the Kalman filter as textbooks have it."""
    mean, covariance, found = torch.zeros(len(prior), dtype=F64), prior, []
    for t, value in enumerate(measured):
        if t:
            mean, covariance = move[t - 1] @ mean, move[t - 1] @ covariance @ move[t - 1].mT + pushed[t - 1]
        gain = torch.linalg.solve(covariance + seen, covariance).mT
        mean, covariance = mean + gain @ (value - mean), covariance - gain @ covariance
        found.append((mean, covariance))
    means, covariances = zip(*found, strict=True)
    return torch.stack(means), torch.stack(covariances)


def test_matrices_of_another_shape_are_refused() -> None:
    eye = torch.eye(2).expand(5, 2, 2)
    with pytest.raises(ArgumentError, match=r"`transition` has shape \[5, 2, 2\]; expected \[..., 4, 2, 2\]"):
        sample_backwards(torch.zeros(5, 2), eye, eye, eye[1:])
    with pytest.raises(ArgumentError, match="`mean` has 0 tokens"):
        sample_backwards(torch.zeros(0, 2), eye[:0], eye[:0], eye[:0])


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("mean", [[0.0]]),
        ("mean", torch.zeros(5)),
        ("mean", torch.zeros(5, 2, dtype=torch.float16)),
        ("mean", torch.full((5, 2), torch.nan)),
        ("covariance", torch.eye(2).expand(3, 5, 2, 2)),
        ("covariance", torch.eye(2, dtype=F64).expand(5, 2, 2)),
        ("noise", torch.full((4, 2, 2), torch.nan)),
        ("count", 0),
        ("generator", 3),
    ],
)
def test_wrong_arguments_of_samples_are_named(name: str, wrong: object) -> None:
    eye = torch.eye(2).expand(5, 2, 2)
    right = {"mean": torch.zeros(5, 2), "covariance": eye, "transition": eye[1:], "noise": eye[1:], "count": 3}
    with pytest.raises(ArgumentError, match=f"`{name}`"):
        sample_backwards(**{**right, name: wrong})


def test_matrices_of_samples_broadcast_over_the_batch() -> None:
    eye = torch.eye(2).expand(5, 2, 2)
    assert sample_backwards(torch.zeros(3, 5, 2), eye, eye[1:], eye[None, 1:], count=2).shape == (2, 3, 5, 2)
