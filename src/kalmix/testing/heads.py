"""Several problems of equal sizes as one with more heads: ops filter each head by itself, so one call computes all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from kalmix.testing.tolerances import DATA, Tensors

HISTORY = ("keys", "values")  # tensors of a belief `[N, S, H, ...]`; others are `[N, G, ...]`

Axis = int | None  # of the heads; `None` for a tensor without heads, which all problems share


def head_axis(name: str, invariant: Collection[str] = ()) -> Axis:
    """Return the axis of the heads of a signal, an output or a tensor of a belief.

    Args:
        name: name of the tensor; those of beliefs begin with "prior." or "belief.".
        invariant: signals without batch and token axes.
    """
    kind, _, field = name.rpartition(".")
    is_belief = kind in ("prior", "belief")
    if (f"prior.{field}" if is_belief else name) in DATA:
        return None
    if is_belief:
        return 2 if field in HISTORY else 1
    return 0 if name in invariant else 2


def solve_together(
    compute: Callable[[Tensors, int], Sequence[Tensor]], input_axes: Mapping[str, Axis], output_axes: Sequence[Axis]
) -> Callable[[list[Tensors]], list[list[Tensor]]]:
    """Return a function that computes the outputs of several problems in one call.

    Args:
        compute: computes outputs from inputs and the number of problems that they join.
        input_axes: axis of the heads of each input.
        output_axes: axis of the heads of each output.
    """

    def solve(problems: list[Tensors]) -> list[list[Tensor]]:
        first, count = problems[0], len(problems)
        axes = {name: input_axes[name] for name in first}
        joined = {
            name: first[name] if axis is None else torch.cat([problem[name] for problem in problems], axis)
            for name, axis in axes.items()
        }
        outputs = zip(output_axes, compute(joined, count), strict=True)
        parts = [[x] * count if axis is None else x.chunk(count, axis) for axis, x in outputs]
        return [list(of_one) for of_one in zip(*parts, strict=True)]

    return solve


def repeat_heads(tensors: Sequence[Tensor], axes: Sequence[Axis], count: int) -> list[Tensor]:
    """Return tensors for `count` joined problems that have the same ones."""
    pairs = zip(tensors, axes, strict=True)
    return [x if axis is None else torch.cat([x] * count, axis) for x, axis in pairs]


def draw_weights(outputs: Sequence[Tensor], axes: Sequence[Axis], count: int = 1) -> list[Tensor]:
    """Return random weights of the outputs that every dtype represents exactly, equal for `count` joined problems."""
    draw, weights = torch.Generator().manual_seed(1), []
    for x, axis in zip(outputs, axes, strict=True):
        shape = [size // count if i == axis else size for i, size in enumerate(x.shape)]
        weights.append((torch.randint(-8, 9, shape, generator=draw) / 4).to(x))
    return repeat_heads(weights, axes, count)
