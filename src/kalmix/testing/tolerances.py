"""How wrong a kernel may be: tolerances computed from the problem and its dtype, not tuned.

A stable algorithm is as wrong as the exact one would be had its inputs been rounded a few times over (mixed
stability). So the budget of an output is how far the float64 oracle moves when every input moves by one
rounding of the precision computed in, and the belief after every token by another, times a small constant for the
few roundings each token costs, plus the rounding of the output's own dtype. Rounding the belief matters where evidence
is nearly certain: of a covariance of norm p0, an error of eps p0 remains where r^2 is left (r^2 is the noise of an
observation), so that the next gains are wrong by about eps p0 / r^2. A kernel whose tensor cores take products in half
precision rounds each of them about once more, and independently: that is allowed for in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kalmix._oracle import transform_stored_beliefs
from kalmix.beliefs import HistoryBelief

ROUNDINGS = 16  # operations on the path of one token through a cell: about a dozen, and the sum over slots
PRODUCT_ROUNDINGS = 2  # to half precision: of a product of signals, and of what it is multiplied with
DRAWS = 3
DATA = {"times", "prior.times", "prior.positions"}  # taken as they are: nothing rounds them, no gradient reaches them
SYMMETRIC = {"covariance", "gram"}  # tensors of beliefs

Tensors = dict[str, Tensor]


def relative_error(got: Tensor, expected: Tensor) -> float:
    """||got - want|| / ||want||, norm-wise, in float64; NaN counts as infinitely wrong."""
    got, expected = got.detach().double(), expected.detach().double()
    error = float((got - expected).norm() / expected.norm().clamp_min(torch.finfo(torch.float64).tiny))
    return error if error == error else float("inf")


def perturb_inputs(inputs: Tensors, epsilon: float, draw: int) -> Tensors:
    """Inputs moved by up to one rounding each, relative; logarithms also by that much absolutely."""
    generator = torch.Generator().manual_seed(draw)
    perturbed = {}
    for name, x in inputs.items():
        if name in DATA:
            perturbed[name] = x
            continue
        noise = (torch.rand(x.shape, generator=generator, dtype=torch.float64) * 2 - 1).to(x.device) * epsilon
        perturbed[name] = (x + (x.abs() + 1) * noise).clamp(max=0.0) if name == "log_decay" else x + x * noise
    return perturbed


def perturb_belief(belief: Any, epsilon: float, generator: torch.Generator) -> Any:
    """Return the belief of one sequence, moved by up to one rounding; a history holds inputs, which nothing rounds."""
    if isinstance(belief, HistoryBelief):
        return belief
    perturbed = []
    for name, x in zip(belief._fields, belief, strict=True):  # type: ignore[attr-defined]
        noise = (torch.rand(x.shape, generator=generator, dtype=torch.float64) * 2 - 1).to(x.device) * epsilon
        if name in SYMMETRIC:
            noise = noise.tril() + noise.tril(-1).mT
        perturbed.append(x + x * noise)
    return type(belief)(*perturbed)


def budgets(
    exact: Callable[[Tensors], Sequence[Tensor]],
    inputs: Tensors,
    compute_dtype: torch.dtype,
    output_dtypes: Sequence[torch.dtype],
    products: torch.dtype | None = None,
    draws: int = DRAWS,
) -> list[float]:
    """The budget of each output of `exact`, relative and norm-wise.

    Args:
        exact: the float64 specification, from inputs to outputs (or to gradients).
        inputs: float64 tensors.
        computed: the dtype that a kernel computes in.
        returned: the dtype of each output.
        products: the dtype that it rounds products to on the way, if it does.
        draws: how often to round the inputs, each time otherwise; the largest error counts.
    """
    expected = exact(inputs)
    allowed = [torch.finfo(dtype).eps for dtype in output_dtypes]
    for dtype, times in ((compute_dtype, ROUNDINGS), (products, PRODUCT_ROUNDINGS)):
        if dtype is None:
            continue
        epsilon = torch.finfo(dtype).eps
        perturbed = []
        for draw in range(draws):
            with transform_stored_beliefs(
                partial(perturb_belief, epsilon=epsilon, generator=torch.Generator().manual_seed(draw))
            ):
                perturbed.append(exact(perturb_inputs(inputs, epsilon, draw)))
        for i in range(len(expected)):
            allowed[i] += times * (epsilon + max(relative_error(outputs[i], expected[i]) for outputs in perturbed))
    return allowed
