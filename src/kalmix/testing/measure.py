"""Measuring a kernel against the oracle: how far off each output and gradient is, and how far it may be."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.segments import Segments
from kalmix.testing.cases import Case, outputs
from kalmix.testing.tolerances import DATA, DRAWS, Tensors, budgets, relative_error
from kalmix.types import Filtered


class Measured(NamedTuple):
    """One quantity: its relative error against float64, and its budget."""

    quantity: str
    error: float
    budget: float

    @property
    def ok(self) -> bool:
        return self.error <= self.budget


def exact(inputs: Tensors) -> Tensors:
    """The very numbers a kernel was given, in float64 on the CPU; integers as they are."""
    cpu = {name: x.detach().cpu() for name, x in inputs.items()}
    return {name: x.double() if x.is_floating_point() else x for name, x in cpu.items()}


def learnable(inputs: Tensors) -> Tensors:
    """The inputs that gradients reach."""
    return {name: x for name, x in inputs.items() if name not in DATA}


Specified = tuple[list[Tensor], list[float]]  # what the oracle answers, and how far a kernel may be from it
_ANSWERS: OrderedDict[bytes, Specified] = OrderedDict()
_REMEMBERED = 256  # answers


def _remembered(
    case: Case,
    specify: Callable[[Tensors], list[Tensor]],
    dtypes: list[torch.dtype],
    inputs: Tensors,
    segments: Segments | None,
    weights: list[Tensor],
    draws: int,
) -> Specified:
    """The oracle's answer and its budgets, computed once for all kernels that are given the same numbers."""
    given = exact(inputs)
    key = blake2b(repr((case.name, case.carried, case.products, dtypes, list(given), len(weights), draws)).encode())
    rows = [] if segments is None else [segments.rows.cpu()]
    for x in (*given.values(), *rows, *(w.double() for w in weights)):
        key.update(repr(tuple(x.shape)).encode() + x.contiguous().numpy().tobytes())
    answer = _ANSWERS.pop(key.digest(), None)
    if answer is None:
        answer = specify(given), budgets(specify, given, case.carried, dtypes, case.products, draws)
    _ANSWERS[key.digest()] = answer
    if len(_ANSWERS) > _REMEMBERED:
        _ANSWERS.popitem(last=False)
    return answer


def specified(case: Case, inputs: Tensors, segments: Segments | None = None, draws: int = DRAWS) -> Specified:
    """What the oracle answers to a kernel's inputs, and how far the kernel may be from each answer."""

    def specify(x: Tensors) -> list[Tensor]:
        return outputs(case.specify(x, segments and segments.cpu()))

    dtypes = [case.dtype] + [case.carried] * (len(case.quantities) - 1)
    return _remembered(case, specify, dtypes, inputs, segments, [], draws)


def compare(names: list[str], got: list[Tensor], want: list[Tensor], allowed: list[float]) -> list[Measured]:
    return [
        Measured(name, relative_error(g.cpu(), w.cpu()), budget)
        for name, g, w, budget in zip(names, got, want, allowed, strict=True)
    ]


def forward(case: Case, inputs: Tensors, segments: Segments | None = None, draws: int = DRAWS) -> list[Measured]:
    """Mean, variance and final belief against the oracle."""
    return compare(case.quantities, outputs(case.run(inputs, segments)), *specified(case, inputs, segments, draws))


def gradients(case: Case, inputs: Tensors, segments: Segments | None = None, draws: int = DRAWS) -> list[Measured]:
    """The gradient of a random function of mean, variance and final belief, for every signal and the prior."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    weights = [
        torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
        for y in outputs(case.run(inputs, segments))
    ]
    specify = partial(pull_back, partial(case.specify, segments=segments and segments.cpu()), weights)
    dtypes = [x.dtype for x in learnable(inputs).values()]
    want, allowed = _remembered(case, specify, dtypes, inputs, segments, weights, draws)
    got = pull_back(partial(case.run, segments=segments), weights, inputs)
    return compare([f"d {name}" for name in learnable(inputs)], got, want, allowed)


def pull_back(run: Callable[[Tensors], Filtered], weights: list[Tensor], inputs: Tensors) -> list[Tensor]:
    """Gradients of sum(weights * outputs) for every input that they reach."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in learnable(inputs).items()}
    found = outputs(run(inputs | leaves))
    loss = torch.stack([(w.to(y) * y).sum().double() for w, y in zip(weights, found, strict=True)]).sum()
    return list(torch.autograd.grad(loss, list(leaves.values())))
