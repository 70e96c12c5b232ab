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


class OracleFunction(NamedTuple):
    """Outputs or derivatives of the oracle.

    Attributes:
        name: name of the function.
        compute: computes them from float64 inputs and the number of problems whose heads they join.
        outputs: name of each, for `head_axis`. `None` if `compute` takes one problem at a time.
        tensors: other tensors that `compute` uses.
    """

    name: str
    compute: Callable[[Tensors, int], list[Tensor]]
    outputs: list[str] | None
    tensors: Sequence[Tensor] = ()


def cached_expected(
    case: Case,
    function: OracleFunction,
    dtypes: list[torch.dtype],
    inputs: Tensors,
    segments: Segments | None = None,
    draws: int = DRAWS,
) -> Expected:
    """Return the oracle's outputs and budgets, from the cache if another kernel had the same inputs.

    Args:
        case: a case of the problem.
        function: function of the oracle.
        dtypes: dtype of each of the kernel's outputs.
        inputs: inputs of the kernel.
        segments: sequences that the function uses.
        draws: number of random roundings for the budgets.
    """
    given = exact(inputs)
    name, compute, outputs, tensors = function
    named = (case.name, name, case.state_dtype, case.product_dtype, dtypes, list(given), len(tensors), draws)
    key = blake2b(repr(named).encode())
    rows = [] if segments is None else [segments.rows.cpu()]
    for x in (*given.values(), *rows, *(x.double() for x in tensors)):
        key.update(repr(tuple(x.shape)).encode() + x.contiguous().numpy().tobytes())
    answer = _CACHE.pop(key.digest(), None)
    if answer is None:
        together = None
        if outputs is not None:
            axes = {x: head_axis(x, case.problem.invariant) for x in (*given, *outputs)}
            together = solve_together(compute, axes, [axes[x] for x in outputs])
        expected, once = compute(given, 1), lambda x: compute(x, 1)
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

    function = OracleFunction("outputs", compute, case.quantities)
    return cached_expected(case, function, _output_dtypes(case), inputs, segments, draws)


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
    function = OracleFunction("gradients", compute, names, weights)
    expected = cached_expected(case, function, [x.dtype for x in got], inputs, segments, draws)
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
    function = OracleFunction("outputs and gradients", compute, quantities + names, weights)
    expected = cached_expected(case, function, dtypes, inputs, segments, draws)
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
