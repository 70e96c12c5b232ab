"""Convergence of residuals and errors by iteration (Figures 1a and 9), and its limit by rounding to bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kalmix_bench.experiments.solvers.iterations import (
    PUBLISHED,
    chebyshev,
    chebyshev_residual_form,
    conjugate_gradient,
)
from kalmix_bench.experiments.solvers.systems import ARITHMETICS, Arithmetic, Systems
from kalmix_bench.experiments.solvers.tokens import KINDS, Tokens, draw
from kalmix_bench.runner.experiment import ProgressFn

FACTORS = (0.01, 0.02, 0.05, 0.1)  # strengths of the ridge, a (section K)
READ = (5, 10, 15, 20, 25, 30, 40, 60)  # iterations after which read-outs are evaluated
ROUNDED = ("float32", "bfloat16 products", "bfloat16 throughout")


@dataclass(frozen=True)
class Convergence:
    """Sizes of the studies of residuals and of bfloat16; the defaults are section F's, 8 sequences of 8 heads."""

    sequences: int = 64
    length: int = 2048
    width: int = 128
    iterations: int = 60
    factors: tuple[float, ...] = FACTORS


def _conjugate(systems: Systems, rhs: Tensor, iterations: int, arithmetic: Arithmetic) -> Iterator[Tensor]:
    yield from (at.x for at in conjugate_gradient(systems, rhs, iterations, arithmetic))


def _published(systems: Systems, rhs: Tensor, iterations: int, arithmetic: Arithmetic) -> Iterator[Tensor]:
    yield from (at.x for at in conjugate_gradient(systems, rhs, iterations, arithmetic, PUBLISHED))


SOLVERS = {
    "Chebyshev": chebyshev,
    "Chebyshev by residuals": chebyshev_residual_form,
    "CG": _conjugate,
    "CG + 1e-5": _published,
}


def residuals(setting: Convergence, seed: int, device: torch.device, on_progress: ProgressFn) -> dict[str, Any]:
    """Compute the largest and the median of ||S x_i - q||_2 over tokens by iteration; S = H / ||H||_F + a I, |q| = 1.

    Keys are random. The iteration uses its own arithmetic; S x_i - q is computed in float64 from unrounded inputs.
    """
    systems, rhs = _systems(draw("random", setting.sequences, setting.length, setting.width, seed, device))
    cases = [(a, f, s) for a in ROUNDED for f in setting.factors for s in SOLVERS]
    curves = []
    for done, (name, factor, solver) in enumerate(cases):
        on_progress(done / len(cases), f"{name}, a = {factor:g}, {solver}")
        arithmetic, truth = ARITHMETICS[name], systems.with_factor(factor)
        rounded = truth.to(arithmetic.dtype)
        iterates = SOLVERS[solver](rounded, rhs.to(arithmetic.dtype), setting.iterations, arithmetic)
        norms = [(truth.apply(x.double()) - rhs).norm(dim=-1) for x in iterates]
        largest, median = ([float(of(x)) for x in norms] for of in (torch.max, torch.median))
        case = {"solver": solver, "arithmetic": name, "factor": factor}
        curves.append(case | {"residual": largest, "median": median})
    return {"curves": curves}


def precisions(setting: Convergence, seed: int, device: torch.device, on_progress: ProgressFn) -> dict[str, Any]:
    """Compute errors of x_i against a float64 Cholesky solution by iteration, for keys and queries that are bfloat16
    numbers.

    Returns:
        "curves", each with `error`, ||X_i - X|| / ||X|| over all tokens; `worst`, the largest |x_i - x| / |x| of a
        token;
        and `read`, the error of the read-out U'x for independent normal values at the iterations `READ`. The expected
        square of that read-out is x'H x, so `read` is the root of sum (x_i - x)'H (x_i - x) over sum x'H x.
    """
    cases = [(k, f) for k in KINDS for f in setting.factors]
    curves = []
    for done, (keys, factor) in enumerate(cases):
        on_progress(done / len(cases), f"{keys} keys, a = {factor:g}")
        tokens = draw(keys, setting.sequences, setting.length, setting.width, seed, device)
        systems, rhs = _systems(Tokens(*(x.bfloat16().double() for x in tokens[:2])))
        truth = systems.with_factor(factor)
        x = truth.exact(rhs)
        bare = truth.with_factor(0.0)

        def energy(x: Tensor, bare: Systems = bare) -> Tensor:  # x is ||H|| times the solution
            return (x * bare.apply(x) / bare.norm).sum()

        norm = energy(x)
        for name in ROUNDED:
            arithmetic = ARITHMETICS[name]
            rounded, low_rhs = truth.to(arithmetic.dtype), rhs.to(arithmetic.dtype)
            for solver in ("Chebyshev", "Chebyshev by residuals", "CG"):
                case = {"keys": keys, "solver": solver, "arithmetic": name, "factor": factor}
                error, worst, read = [], [], []
                for i, y in enumerate(SOLVERS[solver](rounded, low_rhs, setting.iterations, arithmetic)):
                    off = y.double() - x
                    error.append(float(off.norm() / x.norm()))
                    worst.append(float((off.norm(dim=-1) / x.norm(dim=-1)).max()))
                    if i in READ:
                        read.append([i, float((energy(off) / norm).sqrt())])
                curves.append(case | {"read": read, "error": error, "worst": worst})
    return {"curves": curves}


def _systems(tokens: Tokens) -> tuple[Systems, Tensor]:
    systems = Systems.of(tokens, FACTORS[0])
    return systems, systems.to_chunks(tokens.q)
