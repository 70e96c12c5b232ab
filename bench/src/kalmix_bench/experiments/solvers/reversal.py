"""Reversed iterations: their divisors (Figure 5) and the growth of rounding errors (Remark 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kalmix.ops._ridge.linear_solvers import chebyshev_weights
from kalmix_bench.experiments.solvers.convergence import FACTORS
from kalmix_bench.experiments.solvers.iterations import chebyshev, conjugate_gradient, radius, rate, reverse_chebyshev
from kalmix_bench.experiments.solvers.systems import ARITHMETICS, Systems
from kalmix_bench.experiments.solvers.tokens import draw
from kalmix_bench.runner.experiment import ProgressFn

CONDITIONS = tuple(10 ** (1 + i / 20) for i in range(41))  # 10 to 1,000
STARTED = 5  # steps back after which growth is measured, when it has become regular


@dataclass(frozen=True)
class Reversal:
    """Sizes of the study, and the number of iterations that are run and reversed."""

    sequences: int = 64
    length: int = 2048
    width: int = 128
    iterations: int = 30
    factors: tuple[float, ...] = FACTORS


def reversals(setting: Reversal, seed: int, device: torch.device, on_progress: ProgressFn) -> dict[str, Any]:
    """Compute divisors of both reversed iterations, and errors of the iterates of a reversed Chebyshev iteration.

    `error` is ||X~_i - X_i|| / ||X_r|| over all tokens, from the first step back to the last, for random keys. At
    either
    end of the spectrum the reversed recurrence has a double root 1 / sqrt(w* - 1), so after j steps errors have grown
    by
    its j-th power times j. `predicted` is this growth from step `STARTED` on, as a mean factor per step.
    """
    tokens = draw("random", setting.sequences, setting.length, setting.width, seed, device)
    systems = Systems.of(tokens, FACTORS[0])
    rhs = systems.to_chunks(tokens.q)
    names = ("float64", "float32", "bfloat16 throughout")
    growth, divisors = [], []
    for done, factor in enumerate(setting.factors):
        for name in names:
            on_progress((done + names.index(name) / len(names)) / len(setting.factors), f"{name}, a = {factor:g}")
            arithmetic = ARITHMETICS[name]
            rounded, low_rhs = systems.with_factor(factor).to(arithmetic.dtype), rhs.to(arithmetic.dtype)
            iterates = list(chebyshev(rounded, low_rhs, setting.iterations, arithmetic))
            back = reverse_chebyshev(rounded, low_rhs, (iterates[-1], iterates[-2]), setting.iterations, arithmetic)
            pairs = zip(back, reversed(iterates[:-2]), strict=True)
            size = iterates[-1].double().norm()
            error = [float((actual - expected).double().norm() / size) for actual, expected in pairs]
            steps = len(error)
            growth.append(
                {
                    **{"arithmetic": name, "factor": factor, "error": error},
                    "measured": (error[-1] / error[STARTED - 1]) ** (1 / (steps - STARTED)),
                    "predicted": (steps / STARTED) ** (1 / (steps - STARTED)) / rate(factor),
                    "root": 1 / rate(factor),
                }
            )
        single = systems.with_factor(factor).to(torch.float32)
        states = list(conjugate_gradient(single, rhs.float(), setting.iterations, ARITHMETICS["float32"]))[1:]
        ranges = {
            name: [_range(getattr(at, name)) for at in states] for name in ("curvature", "square", "direction_ratio")
        }
        weights = [float(w) - 1 for w in chebyshev_weights(radius(factor), setting.iterations)]
        divisors.append({"factor": factor, "weights": [min(weights), max(weights)], **ranges})
    return {"chebyshev": bounds(setting.iterations), "conjugate": divisors, "growth": growth}


def bounds(iterations: int) -> dict[str, list[float]]:
    """Compute Lemma 3 by condition number: the smallest and largest w_i - 1 of a run, and their limit."""
    weights = [chebyshev_weights(radius(1 / (c - 1)), iterations) for c in CONDITIONS]
    numbers = [[float(w) - 1 for w in run] for run in weights]
    return {
        "condition": list(CONDITIONS),
        "smallest": [min(run) for run in numbers],
        "largest": [max(run) for run in numbers],
        "limit": [fixed_point(radius(1 / (c - 1))) - 1 for c in CONDITIONS],
    }


def fixed_point(rho: float) -> float:
    """Return w*, the limit of the weights (Lemma 3)."""
    return 2 * (1 - (1 - rho**2) ** 0.5) / rho**2


def _range(divisor: Tensor) -> list[float]:
    """Return the smallest and largest positive divisor; 0 means that a token's residual has vanished."""
    some = divisor[divisor > 0]
    return [float(some.min()), float(some.max())] if len(some) else [1.0, 1.0]
