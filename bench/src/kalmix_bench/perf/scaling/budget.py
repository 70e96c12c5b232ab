"""Error budgets of a model in float32, by the rule that `kalmix.testing.tolerances` has for kernels."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from kalmix.testing.tolerances import DRAWS, ROUNDINGS
from kalmix_bench.perf.scaling.methods import Case, build, count_rows, errors_between, expect, make_batch

EPSILON = torch.finfo(torch.float32).eps  # 2^-23


def budgets_of(layer: str, method: str) -> dict[str, float]:
    """Return the largest accepted difference in float32 of the loss and of each gradient, relative.

    The error of a stable algorithm is at most the change of the exact result when its inputs are rounded a few times.
    The budget is therefore 2 * 16 * (2^-23 + c): c is the change in float64 when all parameters and all outputs of
    modules are rounded to float32 once, the largest of three random roundings. 16 is the number of roundings that the
    tests of kernels allow, and both sides of the comparison round. No result in float32 enters it.

    The model runs on the CPU, in one process.
    """
    return _budgets(layer, count_rows(method), "packed" in method)


@cache
def _budgets(layer: str, rows: int, packed: bool) -> dict[str, float]:
    case = Case(layer, torch.device("cpu"), torch.float64)
    data, segments = make_batch(case.device, rows, packed)
    exact = expect(build(case), data, segments)
    changes = dict.fromkeys(["loss", *exact.gradients], 0.0)
    for draw in range(DRAWS):
        model = build(case)
        round_randomly(model, torch.Generator().manual_seed(draw))
        for name, change in errors_between(expect(model, data, segments), exact).items():
            changes[name] = max(changes[name], change)
    if not all(math.isfinite(change) for change in changes.values()):
        raise RuntimeError(f"gradients of {layer!r} in float64 are not finite")
    return {name: 2 * ROUNDINGS * (EPSILON + change) for name, change in changes.items()}


def round_randomly(model: nn.Module, generator: torch.Generator) -> None:
    """Change all parameters, and from now on all outputs of modules, by up to 2^-23, relative."""

    def rounded(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return x * (1 + EPSILON * (2 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1))

    with torch.no_grad():
        for p in model.parameters():
            p.copy_(rounded(p))
    for module in model.modules():
        if module is not model:  # its output has the loss
            module.register_forward_hook(lambda module, inputs, output: tree_map(rounded, output))
