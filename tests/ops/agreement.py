"""Comparison of a kernel with a function of float64 inputs, within the effect of rounding the inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kalmix.testing.heads import Axis, solve_together
from kalmix.testing.tolerances import DRAWS, Tensors, budgets, relative_error


def check_agreement(
    got: Sequence[Tensor],
    compute: Callable[[Tensors, int], Sequence[Tensor]],
    inputs: Tensors,
    input_axes: Mapping[str, Axis],
    output_axes: Mapping[str, Axis],
    products: torch.dtype | None = None,
    draws: int = DRAWS,
) -> None:
    """Check outputs of a kernel and the gradients of all inputs.

    Args:
        got: outputs, then gradients.
        compute: computes both from float64 inputs and the number of problems whose heads they join.
        inputs: inputs of the kernel.
        input_axes: axis of the heads of each input.
        output_axes: axis of the heads of each output, by name.
        products: half-precision dtype to which the kernel rounds products, if any.
        draws: number of random roundings; the largest change counts.
    """
    exact, dtypes = {name: x.double() for name, x in inputs.items()}, [x.dtype for x in got]
    axes = [*output_axes.values(), *(input_axes[name] for name in inputs)]
    want, together = compute(exact, 1), solve_together(compute, input_axes, axes)
    allowed = budgets(lambda x: compute(x, 1), exact, want, torch.float32, dtypes, products, draws, exact_many=together)
    for name, x, y, budget in zip([*output_axes, *(f"d {x}" for x in inputs)], got, want, allowed, strict=True):
        error = relative_error(x, y) if y.norm() > 0 else float(x.norm())
        assert error <= budget, f"{name}: {error:.2e}, allowed {budget:.2e}"
