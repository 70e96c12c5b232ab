"""Checks of second derivatives, forward mode and `vmap`: equal to the oracle's, or refused by a `KernelError`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kalmix.errors import KernelError
from kalmix.ops._shared.kernel import TRANSFORMS
from kalmix.testing.cases import Case, outputs
from kalmix.testing.measure import Measurement, OracleFunction, cached_expected, compare, differentiable, exact
from kalmix.testing.tolerances import Tensors
from kalmix.types import Filtered

Run = Callable[[Tensors], Filtered]
Derive = Callable[[Run, Tensors, Tensors], list[Tensor]]  # (run, inputs, directions of the differentiable ones)


def directions(case: Case, inputs: Tensors) -> Tensors:
    """Return random tangents of all differentiable inputs."""
    generator = torch.Generator().manual_seed(case.seed + 2)
    return {
        name: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
        for name, x in differentiable(inputs).items()
    }


def _floats(found: Filtered) -> list[Tensor]:
    return [y for y in outputs(found) if y.is_floating_point()]


def _loss(found: Filtered) -> Tensor:
    """Return a weighted sum of mean and variance plus half the sum of squares of the belief.

    Mean and variance enter linearly, with weights that bfloat16 can represent: squares would add the rounding of a
    bfloat16 output to every second derivative.
    """
    read = [y for y in (found.mean, found.variance) if y is not None]
    weights = [(torch.arange(y.numel(), dtype=torch.float64, device=y.device) % 7 - 2).reshape(y.shape) for y in read]
    linear = [(w * y.double()).sum() for w, y in zip(weights, read, strict=True)]
    squares = [y.double().square().sum() / 2 for y in _floats(found)[len(read) :]]
    return torch.stack(linear + squares).sum()


def hessian_product(run: Run, inputs: Tensors, direction: Tensors) -> list[Tensor]:
    """Return the Hessian of `_loss` times a direction, by two backward passes."""
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in direction}
    grads = torch.autograd.grad(_loss(run(inputs | leaves)), list(leaves.values()), create_graph=True)
    slope = torch.stack([(g * d).double().sum() for g, d in zip(grads, direction.values(), strict=True)]).sum()
    return list(torch.autograd.grad(slope, list(leaves.values())))


def forward_mode(run: Run, inputs: Tensors, direction: Tensors) -> list[Tensor]:
    """Return the derivatives of all outputs along a direction, by dual numbers."""
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(inputs[name], tangent) for name, tangent in direction.items()}
        found = [(y, forward_ad.unpack_dual(y).tangent) for y in _floats(run(inputs | duals))]
        return [torch.zeros_like(y) if tangent is None else tangent for y, tangent in found]


def jvp(run: Run, inputs: Tensors, direction: Tensors) -> list[Tensor]:
    """Return the derivatives of all outputs along a direction, by `torch.func.jvp`."""
    primals = {name: inputs[name] for name in direction}
    return list(torch.func.jvp(lambda x: tuple(_floats(run(inputs | x))), (primals,), (direction,))[1])


def curvature(run: Run, inputs: Tensors, direction: Tensors) -> list[Tensor]:
    """Return the second derivative of `_loss` along a direction, by `torch.func.hessian`."""

    def loss(step: Tensor) -> Tensor:
        return _loss(run(inputs | {name: inputs[name] + (step * x).to(x) for name, x in direction.items()}))

    step = torch.zeros((), dtype=torch.float64, device=next(iter(direction.values())).device)
    least_precise = max((x.dtype for x in direction.values()), key=lambda dtype: torch.finfo(dtype).eps)
    return [torch.func.hessian(loss)(step).to(least_precise)]  # gradients with respect to inputs have their precision


def batched(run: Run, inputs: Tensors, direction: Tensors) -> list[Tensor]:
    """Return all outputs for two scales of the inputs, by `torch.func.vmap`."""
    steps = {name: torch.stack([inputs[name], inputs[name] * 0.5]) for name in direction}
    return list(torch.func.vmap(lambda x: tuple(_floats(run(inputs | x))))(steps))


def quadratic(run: Run, inputs: Tensors, direction: Tensors) -> list[Tensor]:
    """Return the expected result of `curvature`, by `hessian_product`."""
    products = zip(hessian_product(run, inputs, direction), direction.values(), strict=True)
    return [torch.stack([(x * d).double().sum() for x, d in products]).sum()]


def run_in_loop(run: Run, inputs: Tensors, direction: Tensors) -> list[Tensor]:
    """Return the expected result of `batched`, by a loop."""
    found = [_floats(run(inputs | {name: inputs[name] * scale for name in direction})) for scale in (1.0, 0.5)]
    return [torch.stack(pair) for pair in zip(*found, strict=True)]


EXPECTED_BY: dict[Derive, Derive] = {jvp: forward_mode, curvature: quadratic, batched: run_in_loop}


def measure(case: Case, derive: Derive) -> list[Measurement]:
    """Compare a kernel's derivative with the oracle's, which is computed by another method if `EXPECTED_BY` has one."""
    inputs = case.inputs()
    direction = directions(case, inputs)
    compute = EXPECTED_BY.get(derive, derive)

    def expected_outputs(x: Tensors, count: int) -> list[Tensor]:
        return compute(case.run_oracle, x, exact(direction))

    got = derive(case.run, inputs, direction)
    function = OracleFunction(compute.__name__, expected_outputs, None, list(direction.values()))
    expected = cached_expected(case, function, [x.dtype for x in got], inputs)
    return compare([f"{derive.__name__}[{i}]" for i in range(len(got))], got, *expected)


def assert_refused(case: Case, derive: Derive, names: list[str]) -> None:
    """Check that the kernel raises a `KernelError` that names "reference", for every differentiable input."""
    inputs = case.inputs()
    direction = directions(case, inputs)
    for chosen in [names, *([name] for name in names if not case.interpreted and len(names) > 1)]:
        try:
            derive(case.run, inputs, {name: direction[name] for name in chosen})
        except KernelError as error:
            assert "reference" in str(error), error
        else:
            raise AssertionError(
                f"{derive.__name__} of {', '.join(chosen)} is computed, but the kernel does not declare it"
            )


def supports_transforms(case: Case) -> bool:
    """Return whether the kernel declares derivatives of every order."""
    return TRANSFORMS in case.row.features
