"""Linear stochastic differential equations: their exact transitions over any time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kalmix.errors import ArgumentError

Matrix = tuple[tuple[float, ...], ...]

SPIRAL: Matrix = ((0.9, -2.0), (1.0, -1.1))  # Adaptive Filter Attention, section 4.3; eigenvalues -0.1 + i, -0.1 - i
STEP_TOLERANCE = 1e-6  # in steps: rounding error accepted in a lag that must be a multiple of a step


@dataclass(frozen=True)
class System:
    """System dx = A x dt + s dw, observed as z = x + noise; all noises are independent and equal in every component.

    Attributes:
        drift: A, `[d, d]`, diagonalizable, as nested tuples of numbers.
        process_noise: s^2, variance added to every component per unit of time.
        obs_noise: variance of a measurement of each component.
        start: bounds of the uniform distribution of the first state's norm; its direction is random.
        step: step size of Euler's method, whose discrete system is then simulated; `None` for exact transitions.

    Raises:
        ArgumentError: the drift is not square, or a variance is negative.
    """

    drift: Matrix
    process_noise: float
    obs_noise: float
    start: tuple[float, float] = (17.0, 23.0)
    step: float | None = None

    def __post_init__(self) -> None:
        if {len(row) for row in self.drift} != {len(self.drift)}:
            raise ArgumentError(
                "drift", problem=f"has rows of lengths {[len(row) for row in self.drift]}", expected="a square matrix"
            )
        for name in ("process_noise", "obs_noise"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ArgumentError(name, got=getattr(self, name), expected="a finite variance, at least 0")

    @property
    def dim(self) -> int:
        """Dimension d of the state."""
        return len(self.drift)

    def transition(self, lag: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean matrix and covariance of the Gaussian x(t + lag) given x(t).

        Args:
            lag: `[...]` times, >= 0.

        Returns:
            Matrix and covariance, `[..., d, d]` float64 each. Complexity: O(d^3) per lag; with Euler's method O(d^3)
            per step
            of the longest lag.

        Raises:
            ArgumentError: a lag is not a multiple of Euler's step, or the drift is not diagonalizable.
        """
        drift = torch.tensor(self.drift, dtype=torch.float64)
        if self.step is None:
            return _exact(drift, self.process_noise, lag.double())
        return _euler(drift, self.process_noise, lag.double(), self.step)

    def prior(self) -> Tensor:
        """Return the covariance of the first state, `[d, d]` float64; its mean is 0, its distribution not Gaussian."""
        low, high = self.start
        square = low * low if low == high else (high**3 - low**3) / (3 * (high - low))
        return square / self.dim * torch.eye(self.dim, dtype=torch.float64)


def drift_from_eigenvalues(eigenvalues: Sequence[complex]) -> Matrix:
    """Return a block-diagonal drift with these eigenvalues: damped rotations for pairs -a +- i w.

    Give one of each pair: `drift_from_eigenvalues([-0.1 + 1j, -2.0])` is 3 by 3.
    """
    blocks = []
    for value in map(complex, eigenvalues):
        a, w = value.real, value.imag
        blocks.append(torch.tensor([[a, -w], [w, a]] if w else [[a]], dtype=torch.float64))
    return tuple(tuple(row) for row in torch.block_diag(*blocks).tolist())


def _exact(drift: Tensor, process_noise: float, lag: Tensor) -> tuple[Tensor, Tensor]:
    """Return e^{A t} and the integral of s^2 e^{A u} e^{A' u} over u from 0 to t, computed in the eigenvector basis."""
    values, vectors = torch.linalg.eig(drift)
    if torch.linalg.cond(vectors) > 1e8:
        hint = "Set `step` to use Euler's method, which accepts any matrix"
        raise ArgumentError("drift", got=drift.tolist(), expected="a diagonalizable matrix", hint=hint)
    inverse = torch.linalg.inv(vectors)
    matrix = vectors @ torch.diag_embed((values * lag[..., None]).exp()) @ inverse
    rates = values[:, None] + values.conj()
    accumulated_noise = lag[..., None, None] * _growth(rates * lag[..., None, None])
    return matrix.real, (vectors @ (process_noise * (inverse @ inverse.mH) * accumulated_noise) @ vectors.mH).real


def _growth(x: Tensor) -> Tensor:
    """Return (e^x - 1) / x of complex x without cancellation."""
    real = torch.expm1(x.real) * x.imag.cos() - 2 * (x.imag / 2).sin().square()
    numerator = torch.complex(real, x.real.exp() * x.imag.sin())
    return torch.where(x == 0, 1, numerator / torch.where(x == 0, 1, x))


def _euler(drift: Tensor, process_noise: float, lag: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """Return the transition of lag / h steps x + A x h + sqrt(h) s e."""
    count = (lag / step).round()
    if ((lag / step - count).abs() > STEP_TOLERANCE).any():
        raise ArgumentError(
            "lag", problem="falls between steps of Euler's method", expected=f"whole multiples of {step:g}"
        )
    eye = torch.eye(len(drift), dtype=drift.dtype)
    one, matrices, covariances = eye + step * drift, [eye], [torch.zeros_like(drift)]
    for _ in range(int(count.max()) if count.numel() else 0):
        matrices.append(one @ matrices[-1])
        covariances.append(one @ covariances[-1] @ one.mT + step * process_noise * eye)
    index = count.long()
    return torch.stack(matrices)[index], torch.stack(covariances)[index]
