"""Second derivatives, forward mode and `vmap`: a kernel computes them as the oracle does, or raises `KernelError`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kalmix.errors import KernelError
from kalmix.ops._shared.kernel import TRANSFORMS
from kalmix.testing.cases import Case, outputs
from kalmix.testing.measure import Measured, compare, exact, learnable
from kalmix.testing.tolerances import Tensors, budgets
from kalmix.types import Filtered

Run = Callable[[Tensors], Filtered]
Derive = Callable[[Run, Tensors, Tensors], list[Tensor]]  # (run, inputs, directions of the learnable ones)


def directions(case: Case, inputs: Tensors) -> Tensors:
    """Random tangents of all learnable inputs."""
    generator = torch.Generator().manual_seed(case.seed + 2)
    return {
        name: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
        for name, x in learnable(inputs).items()
    }


def _floats(found: Filtered) -> list[Tensor]:
    return [y for y in outputs(found) if y.is_floating_point()]


def _loss(found: Filtered) -> Tensor:
    return torch.stack([y.double().square().sum() for y in _floats(found)]).sum() / 2


def hessian_product(run: Run, inputs: Tensors, along: Tensors) -> list[Tensor]:
    """The Hessian of the sum of squares of all outputs, times a direction, by two backward passes."""
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in along}
    grads = torch.autograd.grad(_loss(run(inputs | leaves)), list(leaves.values()), create_graph=True)
    slope = torch.stack([(g * d).double().sum() for g, d in zip(grads, along.values(), strict=True)]).sum()
    return list(torch.autograd.grad(slope, list(leaves.values())))


def forward_mode(run: Run, inputs: Tensors, along: Tensors) -> list[Tensor]:
    """The derivatives of all outputs along a direction, by dual numbers."""
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(inputs[name], tangent) for name, tangent in along.items()}
        found = [(y, forward_ad.unpack_dual(y).tangent) for y in _floats(run(inputs | duals))]
        return [torch.zeros_like(y) if tangent is None else tangent for y, tangent in found]


def jvp(run: Run, inputs: Tensors, along: Tensors) -> list[Tensor]:
    """Compute the derivative along `along` by `torch.func.jvp`."""
    primals = {name: inputs[name] for name in along}
    return list(torch.func.jvp(lambda x: tuple(_floats(run(inputs | x))), (primals,), (along,))[1])


def curvature(run: Run, inputs: Tensors, along: Tensors) -> list[Tensor]:
    """The second derivative of the sum of squares along a direction, by `torch.func.hessian`."""

    def loss(step: Tensor) -> Tensor:
        return _loss(run(inputs | {name: inputs[name] + (step * x).to(x) for name, x in along.items()}))

    step = torch.zeros((), dtype=torch.float64, device=next(iter(along.values())).device)
    return [torch.func.hessian(loss)(step)]


def batched(run: Run, inputs: Tensors, along: Tensors) -> list[Tensor]:
    """All outputs for two steps along a direction, by `torch.func.vmap`."""
    steps = {name: torch.stack([inputs[name], inputs[name] * 0.5]) for name in along}
    return list(torch.func.vmap(lambda x: tuple(_floats(run(inputs | x))))(steps))


def quadratic(run: Run, inputs: Tensors, along: Tensors) -> list[Tensor]:
    """Return the answer that `curvature` must give."""
    products = zip(hessian_product(run, inputs, along), along.values(), strict=True)
    return [torch.stack([(x * d).double().sum() for x, d in products]).sum()]


def looped(run: Run, inputs: Tensors, along: Tensors) -> list[Tensor]:
    """Return the answer that `batched` must give."""
    found = [_floats(run(inputs | {name: inputs[name] * scale for name in along})) for scale in (1.0, 0.5)]
    return [torch.stack(pair) for pair in zip(*found, strict=True)]


BY_ANOTHER_WAY: dict[Derive, Derive] = {jvp: forward_mode, curvature: quadratic, batched: looped}


def measure(case: Case, derive: Derive) -> list[Measured]:
    """A derivative by the kernel against the oracle's, which is found by another way where there is one."""
    inputs = case.inputs()
    along = directions(case, inputs)

    def specified(x: Tensors) -> list[Tensor]:
        return BY_ANOTHER_WAY.get(derive, derive)(case.specify, x, exact(along))

    got, want = derive(case.run, inputs, along), specified(exact(inputs))
    allowed = budgets(specified, exact(inputs), case.carried, [x.dtype for x in got], case.products)
    return compare([f"{derive.__name__}[{i}]" for i in range(len(got))], got, want, allowed)


def assert_refused(case: Case, derive: Derive, names: list[str]) -> None:
    """Check that the kernel raises `KernelError`, which names the one to use, whatever input is differentiated."""
    inputs = case.inputs()
    along = directions(case, inputs)
    for chosen in [names, *([name] for name in names if not case.interpreted and len(names) > 1)]:
        try:
            derive(case.run, inputs, {name: along[name] for name in chosen})
        except KernelError as error:
            assert "reference" in str(error), error
        else:
            raise AssertionError(f"{derive.__name__} of {', '.join(chosen)} is neither refused nor promised")


def serves(case: Case) -> bool:
    """Whether the kernel promises derivatives of every order."""
    return TRANSFORMS in case.row.features
