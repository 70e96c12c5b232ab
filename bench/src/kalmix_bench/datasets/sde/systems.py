"""Linear stochastic differential equations: how a state moves between any two times, and what is seen of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kalmix.errors import ArgumentError

Matrix = tuple[tuple[float, ...], ...]

SPIRAL: Matrix = ((0.9, -2.0), (1.0, -1.1))  # of Adaptive Filter Attention, section 4.3; eigenvalues -0.1 + i, -0.1 - i
WHOLE = 1e-6  # of a step, by which a lag may miss a whole number of them: times are rounded numbers


@dataclass(frozen=True)
class System:
    """dx = A x dt + s dw, seen at some times as z = x + noise; all noise is independent, and alike in every row.

    Attributes:
        drift: A, `[d, d]`, diagonalisable; its rows are numbers, so that a system can be compared and written down.
        process_noise: s^2, the variance that a unit of time adds to every row.
        obs_noise: variance of a measurement, every row.
        start: the state at the first time has a length uniform between these, in any direction.
        step: of Euler's method, whose discretisation is then what moves; exact if absent.

    Raises:
        ArgumentError: the drift is no square matrix, or a variance is negative.
    """

    drift: Matrix
    process_noise: float
    obs_noise: float
    start: tuple[float, float] = (17.0, 23.0)
    step: float | None = None

    def __post_init__(self) -> None:
        if {len(row) for row in self.drift} != {len(self.drift)}:
            raise ArgumentError("drift", got=f"{[len(row) for row in self.drift]} wide", expected="a square matrix")
        for name in ("process_noise", "obs_noise"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ArgumentError(name, got=getattr(self, name), expected="a variance")

    @property
    def dim(self) -> int:
        """d, the number of rows of the state."""
        return len(self.drift)

    def transition(self, lag: Tensor) -> tuple[Tensor, Tensor]:
        """x(t + lag) given x(t) is Gaussian: the matrix that takes x(t) to its mean, and its covariance.

        Args:
            lag: `[...]` times, >= 0.

        Returns:
            Both `[..., d, d]`, float64. Complexity: O(d^3) a lag; of Euler's method, O(d^3) a step of the longest.

        Raises:
            ArgumentError: a lag is no whole number of Euler's steps, or the drift is not diagonalisable.
        """
        drift = torch.tensor(self.drift, dtype=torch.float64)
        if self.step is None:
            return _exact(drift, self.process_noise, lag.double())
        return _euler(drift, self.process_noise, lag.double(), self.step)

    def prior(self) -> Tensor:
        """The covariance of the first state, `[d, d]` float64; its mean is 0. It is not Gaussian."""
        low, high = self.start
        square = low * low if low == high else (high**3 - low**3) / (3 * (high - low))
        return square / self.dim * torch.eye(self.dim, dtype=torch.float64)


def drift_from_eigenvalues(eigenvalues: Sequence[complex]) -> Matrix:
    """A drift with these eigenvalues, in blocks: a number for a real one, a damped rotation for a pair -a +- i w.

    Of a pair only one is given: `drift_of([-0.1 + 1j, -2.0])` is 3 by 3.
    """
    blocks = []
    for value in map(complex, eigenvalues):
        a, w = value.real, value.imag
        blocks.append(torch.tensor([[a, -w], [w, a]] if w else [[a]], dtype=torch.float64))
    return tuple(tuple(row) for row in torch.block_diag(*blocks).tolist())


def _exact(drift: Tensor, process_noise: float, lag: Tensor) -> tuple[Tensor, Tensor]:
    """e^{A t} and the integral of s^2 e^{A u} e^{A' u} over u up to t, in the basis of eigenvectors."""
    values, vectors = torch.linalg.eig(drift)
    if torch.linalg.cond(vectors) > 1e8:
        raise ArgumentError("drift", got=drift.tolist(), expected="diagonalisable")
    inverse = torch.linalg.inv(vectors)
    matrix = vectors @ torch.diag_embed((values * lag[..., None]).exp()) @ inverse
    rates = values[:, None] + values.conj()
    grown = lag[..., None, None] * _growth(rates * lag[..., None, None])
    return matrix.real, (vectors @ (process_noise * (inverse @ inverse.mH) * grown) @ vectors.mH).real


def _growth(x: Tensor) -> Tensor:
    """(e^x - 1) / x of complex x, without cancellation."""
    real = torch.expm1(x.real) * x.imag.cos() - 2 * (x.imag / 2).sin().square()
    less = torch.complex(real, x.real.exp() * x.imag.sin())
    return torch.where(x == 0, 1, less / torch.where(x == 0, 1, x))


def _euler(drift: Tensor, process_noise: float, lag: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """What x + A x h + sqrt(h) s e, taken lag / h times, amounts to."""
    count = (lag / step).round()
    if ((lag / step - count).abs() > WHOLE).any():
        raise ArgumentError("lag", got="between steps of Euler's method", expected=f"whole multiples of {step:g}")
    eye = torch.eye(len(drift), dtype=drift.dtype)
    one, matrices, covariances = eye + step * drift, [eye], [torch.zeros_like(drift)]
    for _ in range(int(count.max()) if count.numel() else 0):
        matrices.append(one @ matrices[-1])
        covariances.append(one @ covariances[-1] @ one.mT + step * process_noise * eye)
    index = count.long()
    return torch.stack(matrices)[index], torch.stack(covariances)[index]
