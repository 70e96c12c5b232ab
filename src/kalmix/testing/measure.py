"""Errors of a kernel's outputs and gradients against the oracle, with their budgets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.segments import Segments
from kalmix.testing.cases import Case, outputs
from kalmix.testing.heads import head_axis, repeat_heads, solve_together
from kalmix.testing.tolerances import DATA, DRAWS, Tensors, budgets, relative_error
from kalmix.types import Filtered


class Measurement(NamedTuple):
    """Relative error of one quantity against float64, and its budget."""

    quantity: str
    error: float
    budget: float

    @property
    def ok(self) -> bool:
        return self.error <= self.budget


def exact(inputs: Tensors) -> Tensors:
    """Return the inputs as float64 on the CPU; integers are unchanged."""
    cpu = {name: x.detach().cpu() for name, x in inputs.items()}
    return {name: x.double() if x.is_floating_point() else x for name, x in cpu.items()}


def differentiable(inputs: Tensors) -> Tensors:
    """Return the inputs that have gradients."""
    return {name: x for name, x in inputs.items() if name not in DATA}


Expected = tuple[list[Tensor], list[float]]  # outputs of the oracle, and the error budget of each
_CACHE: OrderedDict[bytes, Expected] = OrderedDict()
_CACHE_SIZE = 256  # entries


Compute = Callable[[Tensors, int], list[Tensor]]  # from inputs and the number of problems whose heads they join


def cached_expected(
    case: Case,
    what: str,
    compute: Compute,
    names: list[str] | None,
    dtypes: list[torch.dtype],
    inputs: Tensors,
    segments: Segments | None = None,
    weights: Sequence[Tensor] = (),
    draws: int = DRAWS,
) -> Expected:
    """Return the oracle's outputs and budgets, from the cache if another kernel had the same inputs.

    Args:
        case: a case of the problem.
        what: name of the function `compute`.
        compute: computes outputs or derivatives of the oracle from float64 inputs.
        names: name of each output, for `head_axis`. `None`: `compute` takes one problem at a time.
        dtypes: dtype of each of the kernel's outputs.
        inputs: inputs of the kernel.
        segments: sequences that `compute` uses.
        weights: other tensors that it uses.
        draws: number of random roundings for the budgets.
    """
    given = exact(inputs)
    named = (case.name, what, case.state_dtype, case.product_dtype, dtypes, list(given), len(weights), draws)
    key = blake2b(repr(named).encode())
    rows = [] if segments is None else [segments.rows.cpu()]
    for x in (*given.values(), *rows, *(w.double() for w in weights)):
        key.update(repr(tuple(x.shape)).encode() + x.contiguous().numpy().tobytes())

    def once(x: Tensors) -> list[Tensor]:
        return compute(x, 1)

    answer = _CACHE.pop(key.digest(), None)
    if answer is None:
        expected = once(given)
        together = None
        if names is not None:
            axes = {name: head_axis(name, case.problem.invariant) for name in (*given, *names)}
            together = solve_together(compute, axes, [axes[name] for name in names])
        allowed = budgets(once, given, expected, case.state_dtype, dtypes, case.product_dtype, draws, together)
        answer = expected, allowed
    _CACHE[key.digest()] = answer
    if len(_CACHE) > _CACHE_SIZE:
        _CACHE.popitem(last=False)
    return answer


def expected_outputs(case: Case, inputs: Tensors, segments: Segments | None = None, draws: int = DRAWS) -> Expected:
    """Return the oracle's outputs for a kernel's inputs, and the error budget of each."""

    def compute(x: Tensors, count: int) -> list[Tensor]:
        return outputs(case.run_oracle(x, segments and segments.cpu()))

    return cached_expected(
        case, "forward", compute, case.quantities, _output_dtypes(case), inputs, segments, draws=draws
    )


def _output_dtypes(case: Case) -> list[torch.dtype]:
    return [case.dtype] + [case.state_dtype] * (len(case.quantities) - 1)


def compare(names: list[str], got: list[Tensor], expected: list[Tensor], allowed: list[float]) -> list[Measurement]:
    return [
        Measurement(name, relative_error(g.cpu(), w.cpu()), budget)
        for name, g, w, budget in zip(names, got, expected, allowed, strict=True)
    ]


def forward(case: Case, inputs: Tensors, segments: Segments | None = None, draws: int = DRAWS) -> list[Measurement]:
    """Compare mean, variance and final belief with the oracle."""
    return compare(
        case.quantities, outputs(case.run(inputs, segments)), *expected_outputs(case, inputs, segments, draws)
    )


def gradients(case: Case, inputs: Tensors, segments: Segments | None = None, draws: int = DRAWS) -> list[Measurement]:
    """Compare the gradients of a random linear function of all outputs, for every signal and the prior."""
    got, weights = _kernel_gradients(case, inputs, segments)

    def compute(x: Tensors, count: int) -> list[Tensor]:
        return _oracle_gradients(case, x, segments, weights, count)[1]

    names = list(differentiable(inputs))
    dtypes = [x.dtype for x in got]
    expected = cached_expected(case, "gradients", compute, names, dtypes, inputs, segments, weights, draws)
    return compare([f"d {name}" for name in names], got, *expected)


def forward_and_gradients(
    case: Case, inputs: Tensors, segments: Segments | None = None, draws: int = DRAWS
) -> list[Measurement]:
    """Return the measurements of `forward` and of `gradients`; the oracle runs once for both."""
    read = outputs(case.run(inputs, segments))  # kernels may save nothing if no gradients are required
    got, weights = _kernel_gradients(case, inputs, segments)

    def compute(x: Tensors, count: int) -> list[Tensor]:
        found, grads = _oracle_gradients(case, x, segments, weights, count)
        return found + grads

    names, quantities = list(differentiable(inputs)), case.quantities
    dtypes = _output_dtypes(case) + [x.dtype for x in got]
    what = "forward and gradients"
    expected = cached_expected(case, what, compute, quantities + names, dtypes, inputs, segments, weights, draws)
    return compare([*quantities, *(f"d {name}" for name in names)], read + got, *expected)


def _oracle_gradients(
    case: Case, x: Tensors, segments: Segments | None, weights: list[Tensor], count: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return outputs of the oracle and gradients, for `count` problems with joined heads and the same weights."""
    leaves = with_gradients(x)
    found = outputs(case.run_oracle(x | leaves, segments and segments.cpu()))
    weights = repeat_heads(weights, [head_axis(name) for name in case.quantities], count)
    return [y.detach() for y in found], pull_back(weights, found, leaves)


def _kernel_gradients(case: Case, inputs: Tensors, segments: Segments | None) -> tuple[list[Tensor], list[Tensor]]:
    """Return gradients of the kernel, and the weights of the outputs."""
    generator, leaves = torch.Generator().manual_seed(case.seed + 1), with_gradients(inputs)
    found = outputs(case.run(inputs | leaves, segments))
    weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in found]
    return pull_back(weights, found, leaves), weights


def vjp(run: Callable[[Tensors], Filtered], weights: list[Tensor], inputs: Tensors) -> list[Tensor]:
    """Return the gradients of sum(weights * outputs) for every differentiable input."""
    leaves = with_gradients(inputs)
    return pull_back(weights, outputs(run(inputs | leaves)), leaves)


def with_gradients(inputs: Tensors) -> Tensors:
    """Return copies of the differentiable inputs that require gradients."""
    return {name: x.detach().clone().requires_grad_() for name, x in differentiable(inputs).items()}


def pull_back(weights: list[Tensor], found: list[Tensor], leaves: Tensors) -> list[Tensor]:
    """Return the gradients of sum(weights * found) for every leaf."""
    loss = torch.stack([(w.to(y) * y).sum().double() for w, y in zip(weights, found, strict=True)]).sum()
    return list(torch.autograd.grad(loss, list(leaves.values())))
