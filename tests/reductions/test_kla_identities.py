"""The identities of Kalman Linear Attention in float64, each compared with the op."""

from functools import reduce

import pytest
import torch
from torch import Tensor

from kalmix.beliefs import DiagonalBelief
from kalmix.errors import ArgumentError
from kalmix.ops import diagonal, diagonal_matrix
from kalmix.ops.experimental import diagonal_fft

B, T, H, G, K, V = 2, 23, 1, 2, 3, 5


def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    return low + (high - low) * torch.rand(shape, dtype=torch.float64)


@pytest.fixture
def signals() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "q": torch.randn(B, T, H, K, dtype=torch.float64),
        "k": torch.randn(B, T, H, K, dtype=torch.float64),
        "v": torch.randn(B, T, G, V, dtype=torch.float64),
        "precision": uniform(B, T, G, V, low=0.1, high=3.0),
        "log_decay": -uniform(G, K, V, high=0.3),
        "process_noise": uniform(G, K, V, low=0.01, high=0.2),
    }


@pytest.fixture
def prior() -> DiagonalBelief:
    torch.manual_seed(1)
    return DiagonalBelief(torch.randn(B, G, K, V, dtype=torch.float64), uniform(B, G, K, V, low=0.2, high=2.0))


def beliefs(signals: dict[str, Tensor], prior: DiagonalBelief) -> list[DiagonalBelief]:
    """Return the op's belief before the first and after every token."""
    path = [prior]
    for t in range(T):
        token = {name: x[:, t : t + 1] if x.ndim == 4 else x for name, x in signals.items()}
        path.append(diagonal(**token, belief=path[-1]).belief)
    return path


def cells(signals: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return decay a, noise p, evidence phi = k^2 precision and k precision v: `[B, T, G, K, V]`."""
    key = signals["k"].repeat_interleave(G // H, 2)[..., None]
    precision, value = (signals[name][..., None, :] for name in ("precision", "v"))
    decay, noise = (x.expand(B, T, G, K, V) for x in (signals["log_decay"].exp(), signals["process_noise"]))
    return decay, noise, key**2 * precision, key * precision * value


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_information_form_is_the_moment_form(signals, prior):
    """Equations 16 and 19 give Corollary 2.2 (equation 20): eta / lambda is the mean, 1 / lambda the variance."""
    decay, noise, phi, written = cells(signals)
    precision = 1 / prior.variance
    information = precision * prior.mean
    query = signals["q"].repeat_interleave(G // H, 2)[..., None]
    path, means = beliefs(signals, prior), []
    for t in range(T):
        rho = 1 / (decay[:, t] ** 2 + noise[:, t] * precision)
        information = rho * decay[:, t] * information + written[:, t]
        precision = rho * precision + phi[:, t]
        close(path[t + 1].variance, 1 / precision)
        close(path[t + 1].mean, information / precision)
        gated = decay[:, t] * (1 - phi[:, t] / precision) * path[t].mean + written[:, t] / precision  # equation 20
        close(path[t + 1].mean, gated)
        means.append((query[:, t] * information / precision).sum(-2))
    close(diagonal(**signals, belief=prior).mean, torch.stack(means, 1))


def test_precision_is_a_product_of_moebius_maps(signals, prior):
    """Theorem 1 (equation 17) and Corollary 1.1: products of matrices, in any grouping, give the precisions."""
    decay, noise, phi, _ = cells(signals)
    square = decay**2
    maps = torch.stack([torch.stack([1 + noise * phi, square * phi], -1), torch.stack([noise, square], -1)], -2)
    start = torch.stack([1 / prior.variance, torch.ones_like(prior.variance)], -1)[..., None]
    path, nothing = beliefs(signals, prior), torch.eye(2, dtype=torch.float64)
    for t in range(1, T + 1):
        halves = maps[:, : t // 2], maps[:, t // 2 : t]
        earlier, later = (reduce(lambda done, step: step @ done, half.unbind(1), nothing) for half in halves)
        top, bottom = ((later @ earlier) @ start).squeeze(-1).unbind(-1)
        close(path[t].variance, bottom / top)


def test_mean_minimises_the_local_objective(signals, prior):
    """Equation 21: the gradient at the op's mean is zero, and the objective is strictly convex there."""
    decay, noise, phi, _ = cells(signals)
    path = beliefs(signals, prior)
    for t in range(T):
        key = signals["k"][:, t].repeat_interleave(G // H, 1)[..., None]
        weight, value = (signals[name][:, t, :, None] for name in ("precision", "v"))
        before, mean = path[t], path[t + 1].mean.clone().requires_grad_()
        anchor = 1 / (decay[:, t] ** 2 * before.variance + noise[:, t])  # rho lambda
        loss = weight * (value - key * mean) ** 2 + anchor * (mean - decay[:, t] * before.mean) ** 2
        (slope,) = torch.autograd.grad(loss.sum(), mean)
        assert (slope.abs() <= 1e-12 * (anchor + phi[:, t]) * (1 + value.abs() + before.mean.abs())).all()


def test_information_mean_is_an_affine_scan(signals, prior):
    """Theorem 2 and Corollary 2.1: pairs (f, b) composed two by two give eta = lambda mu."""
    decay, noise, _, written = cells(signals)
    path = beliefs(signals, prior)
    before = torch.stack([belief.variance for belief in path[:-1]], 1)
    gate, shift = decay / (decay**2 + noise / before), written
    stride = 1
    while stride < T:  # a parallel prefix scan
        earlier = torch.cat([torch.ones_like(gate[:, :stride]), gate[:, :-stride]], 1)
        moved = torch.cat([torch.zeros_like(shift[:, :stride]), shift[:, :-stride]], 1)
        gate, shift, stride = gate * earlier, gate * moved + shift, 2 * stride
    information = gate * (prior.mean / prior.variance)[:, None] + shift
    close(information, torch.stack([belief.mean / belief.variance for belief in path[1:]], 1))


def test_convolutions_are_the_noiseless_filter(signals):
    """Theorem 3, with a large prior variance in place of an infinite one."""
    signals |= {"log_decay": signals["log_decay"] / 10, "process_noise": torch.zeros(G, K, V, dtype=torch.float64)}
    key = uniform(H, K, low=0.5, high=1.5)
    got = diagonal_fft(signals["q"], key, signals["v"], precision=signals["precision"], log_decay=signals["log_decay"])
    vague = DiagonalBelief(
        torch.zeros(B, G, K, V, dtype=torch.float64), torch.full((B, G, K, V), 1e12, dtype=torch.float64)
    )
    expected = diagonal(**signals | {"k": key.expand(B, T, H, K)}, belief=vague, variance=True)
    # The prior's weight is 1e-12, that of the evidence at least k^2 precision = 0.025.
    tolerance = 1e-12 / 0.025 * 10
    for ours, theirs in zip((*got[:2], *got.belief), (*expected[:2], *expected.belief), strict=True):
        close(ours, theirs, tolerance)


def test_convolutions_before_any_evidence(signals):
    key, precision = torch.tensor([[1.0, 0.0, 2.0]], dtype=torch.float64), signals["precision"].clone()
    precision[:, :4] = 0
    q = signals["q"].clone()
    q[:, 4:, :, 1] = 0  # the middle slot is never observed; do not read it
    got = diagonal_fft(q, key, signals["v"], precision=precision, log_decay=signals["log_decay"] / 10)
    assert (got.mean[:, :4] == 0).all() and (got.variance[:, :4] == torch.inf).all()
    assert torch.isfinite(got.variance[:, 4:]).all() and torch.isfinite(got.mean).all()
    assert (got.belief.mean[:, :, 1] == 0).all() and (got.belief.variance[:, :, 1] == torch.inf).all()
    empty = diagonal_fft(q[:, :0], key, signals["v"][:, :0], precision=precision[:, :0], log_decay=signals["log_decay"])
    assert empty.mean.shape == (B, 0, G, V) and (empty.belief.variance == torch.inf).all()


def test_convolutions_reject_a_kernel_that_overflows(signals):
    with pytest.raises(ArgumentError, match=r"log_decay.*minimum of -16.*23 tokens"):
        diagonal_fft(
            signals["q"],
            uniform(H, K),
            signals["v"],
            precision=signals["precision"],
            log_decay=torch.full((G, K, V), -16.0, dtype=torch.float64),
        )


@pytest.mark.parametrize("extreme", [{}, {"log_decay": -30.0}, {"precision": 1e4}, {"process_noise": 0.0}], ids=str)
def test_matrix_is_the_op(signals, prior, extreme):
    """Appendix E.4, with the prior's mean; lower triangular and differentiable."""
    signals |= {name: torch.full_like(signals[name], value) for name, value in extreme.items()}
    weights, initial = diagonal_matrix(**signals, belief=prior)
    mean = torch.einsum("bgdts,bsgd->btgd", weights, signals["v"]) + initial
    close(mean, diagonal(**signals, belief=prior).mean)
    assert (weights.triu(1) == 0).all() and weights.shape == (B, G, V, T, T)
    # The op is affine in v, so its Jacobian is the matrix.
    v = signals["v"].clone().requires_grad_()
    (row,) = torch.autograd.grad(diagonal(**signals | {"v": v}, belief=prior).mean[0, 7, 1, 2], v)
    close(row[0, :, 1, 2], weights[0, 1, 2, 7])


def test_matrix_defaults_to_the_ops_prior(signals):
    weights, initial = diagonal_matrix(**signals)
    assert (initial == 0).all()
    close(torch.einsum("bgdts,bsgd->btgd", weights, signals["v"]), diagonal(**signals).mean)
    none = diagonal_matrix(**{name: x[:, :0] if x.ndim == 4 else x for name, x in signals.items()})
    assert none.weights.shape == (B, G, V, 0, 0) and none.initial.shape == (B, 0, G, V)
