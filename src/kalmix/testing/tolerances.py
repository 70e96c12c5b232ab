"""Error budgets of kernels, computed from the problem and the dtype.

The error of a stable algorithm is at most the change of the exact result when its inputs are rounded a few times (mixed
stability). The budget of an output is therefore a sum. Its first term is the change of the float64 oracle when every
input, and the belief after every token, is rounded once in the compute dtype, times a small constant for the number of
roundings per token. Its second term is one rounding in the output's dtype.

The belief must be rounded because observations can be nearly certain. Rounding a covariance of norm p0 leaves an error
of eps p0. If the observation noise is r^2, the covariance becomes about r^2, and the next gains have a relative error
of about eps p0 / r^2. Kernels that multiply in half precision on tensor cores round each product about once more,
independently. A third term allows for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kalmix._oracle import transform_stored_beliefs
from kalmix.beliefs import HistoryBelief

ROUNDINGS = 16  # about twelve operations per token and cell, and the sum over slots
PRODUCT_ROUNDINGS = 2  # roundings to half precision: of a product of signals and of its other factor
DRAWS = 3
DATA = {"times", "prior.times", "prior.positions"}  # never rounded, without gradients
SYMMETRIC = {"covariance", "gram"}  # tensors of beliefs

Tensors = dict[str, Tensor]


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Return ||got - want|| / ||want|| in float64; infinity if `got` has NaN."""
    got, expected = got.detach().double(), expected.detach().double()
    error = float((got - expected).norm() / expected.norm().clamp_min(torch.finfo(torch.float64).tiny))
    return error if error == error else float("inf")


def perturb_inputs(inputs: Tensors, epsilon: float, draw: int) -> Tensors:
    """Return inputs changed by up to `epsilon`, relative; logarithms also by up to `epsilon`, absolute."""
    generator = torch.Generator().manual_seed(draw)
    perturbed = {}
    for name, x in inputs.items():
        if name in DATA:
            perturbed[name] = x
            continue
        noise = (torch.rand(x.shape, generator=generator, dtype=torch.float64) * 2 - 1).to(x.device) * epsilon
        perturbed[name] = (x + (x.abs() + 1) * noise).clamp(max=0.0) if name == "log_decay" else x + x * noise
    return perturbed


def perturb_belief(belief: Any, epsilon: float, generators: Sequence[torch.Generator]) -> Any:
    """Return the belief of one sequence, changed by up to `epsilon`; a history holds inputs and is not changed.

    Each generator draws the changes of an equal share of the heads.
    """
    if isinstance(belief, HistoryBelief):
        return belief
    perturbed = []
    for name, x in zip(belief._fields, belief, strict=True):  # type: ignore[attr-defined]
        share = (len(x) // len(generators), *x.shape[1:])
        drawn = torch.cat([torch.rand(share, generator=each, dtype=torch.float64) for each in generators])
        noise = (drawn * 2 - 1).to(x.device) * epsilon
        if name in SYMMETRIC:
            noise = noise.tril() + noise.tril(-1).mT
        perturbed.append(x + x * noise)
    return type(belief)(*perturbed)


def budgets(
    exact: Callable[[Tensors], Sequence[Tensor]],
    inputs: Tensors,
    expected: Sequence[Tensor],
    compute_dtype: torch.dtype,
    output_dtypes: Sequence[torch.dtype],
    products: torch.dtype | None = None,
    draws: int = DRAWS,
    exact_many: Callable[[list[Tensors]], Sequence[Sequence[Tensor]]] | None = None,
) -> list[float]:
    """Return the budget of each output of `exact`, relative and norm-wise.

    Args:
        exact: float64 function from inputs to outputs or gradients.
        inputs: float64 tensors.
        expected: `exact` of the inputs.
        compute_dtype: dtype in which the kernel computes.
        output_dtypes: dtype of each output.
        products: half-precision dtype to which the kernel rounds products, if any.
        draws: number of random roundings; the largest change counts.
        exact_many: function from several inputs to the outputs of `exact` for each. It replaces `exact` for the rounded
            inputs, all in one call. If it calls the oracle, it must join the heads of all (`heads.solve_together`).
    """
    allowed = [torch.finfo(dtype).eps for dtype in output_dtypes]
    for dtype, times in ((compute_dtype, ROUNDINGS), (products, PRODUCT_ROUNDINGS)):
        if dtype is None:
            continue
        epsilon = torch.finfo(dtype).eps
        rounded = [perturb_inputs(inputs, epsilon, draw) for draw in range(draws)]
        if exact_many is None:
            perturbed = [_with_rounded_beliefs(exact, x, epsilon, [draw]) for draw, x in enumerate(rounded)]
        else:
            perturbed = _with_rounded_beliefs(exact_many, rounded, epsilon, range(draws))
        for i in range(len(expected)):
            allowed[i] += times * (epsilon + max(relative_error(outputs[i], expected[i]) for outputs in perturbed))
    return allowed


def _with_rounded_beliefs(function: Callable[[Any], Any], inputs: Any, epsilon: float, draws: Iterable[int]) -> Any:
    """Call a function of inputs; the oracle in it rounds the belief after every token."""
    generators = [torch.Generator().manual_seed(draw) for draw in draws]
    with transform_stored_beliefs(partial(perturb_belief, epsilon=epsilon, generators=generators)):
        return function(inputs)
