"""Tests of `Sketch`: its seed selects the subspace, in every kernel."""

import pytest
import torch

from kalmix import ArgumentError
from kalmix.ops import Chebyshev, ConjugateGradient, Exact, Fixed, Sketch, ridge
from kalmix.ops._ridge.linear_solvers import decode_solver, encode_solver, sketch_basis

KERNELS = ("chunked", "reference")


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_seed_selects_the_signs_of_an_orthonormal_basis(seed: int) -> None:
    like = torch.zeros(1, 12, dtype=torch.float64)
    basis = sketch_basis(Sketch(5, seed=seed), like)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(5, dtype=torch.float64))
    others = [sketch_basis(Sketch(5, seed=other), like) for other in range(8) if other != seed]
    assert all((basis - other).abs().max() > 0.1 for other in others)


@pytest.mark.parametrize("width", [16, 32, 128])
def test_signs_are_balanced_and_not_periodic(width: int) -> None:
    """Means over 400 seeds are within 5 standard deviations of 0, for single signs and for pairs at each lag."""
    signs = torch.stack([_signs(seed, width) for seed in range(-200, 200)])
    assert len(signs.unique(dim=0)) == 400
    assert signs.mean(0).abs().max() < 5 / 400**0.5
    for lag in range(1, width):
        correlation = (signs[:, lag:] * signs[:, : width - lag]).mean(1)  # of each seed
        deviation = (width - lag) ** -0.5
        assert correlation.mean().abs() < 5 * deviation / 400**0.5, lag
        assert correlation.square().mean() < 1.5 * deviation**2, lag


@pytest.mark.parametrize("seed", [-(2**31) + 1, -13, 2**31 - 1])
@pytest.mark.slow
def test_compiled_and_exported_bases_equal_eager_ones(seed: int) -> None:
    """One graph without a break serves all widths."""
    basis, like = _Basis(seed), torch.zeros(3, 16)
    compiled = torch.compile(basis, backend="aot_eager", fullgraph=True, dynamic=True)
    for x in (like, torch.zeros(3, 24)):
        torch.testing.assert_close(compiled(x), basis(x))
    torch.testing.assert_close(torch.export.export(basis, (like,)).module()(like), basis(like))


class _Basis(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.sketch = Sketch(5, seed=seed)

    def forward(self, like: torch.Tensor) -> torch.Tensor:
        return sketch_basis(self.sketch, like)


def _signs(seed: int, width: int) -> torch.Tensor:
    """Return the signs of a sketch: its first column is constant but for them."""
    return sketch_basis(Sketch(1, seed=seed), torch.zeros(1, width))[:, 0].sign()


@pytest.mark.parametrize("solver", [Chebyshev(7), ConjugateGradient(3), Exact()], ids=str)
def test_encoded_solver_includes_the_seed(solver) -> None:
    sketch = Sketch(4, solver, seed=9)
    assert decode_solver(encode_solver(sketch)) == sketch


@pytest.mark.parametrize("kernel", KERNELS)
def test_sketch_equals_projected_solution_for_each_seed(kernel: str) -> None:
    """The solution is B (B'SB)^-1 B'q at every token; gradients differ between seeds."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 9, 1, 6, generator=generator, dtype=torch.float64) for _ in range(3))
    answers = []
    for seed in (0, 3):
        sketch, keys = Sketch(2, Exact(), seed=seed), k.clone().requires_grad_()
        mean = ridge(q, keys, v, ridge=Fixed(0.5), solver=sketch, kernel=kernel).mean
        (gradient,) = torch.autograd.grad(mean.square().sum(), keys)
        basis, wanted = sketch_basis(sketch, k), []
        for t in range(9):
            before, values = k[0, : t + 1, 0], v[0, : t + 1, 0]
            system = before.mT @ before + 0.5 * torch.eye(6, dtype=torch.float64)
            x = basis @ torch.linalg.solve(basis.mT @ system @ basis, basis.mT @ q[0, t, 0])
            wanted.append(values.mT @ (before @ x))
        torch.testing.assert_close(mean[0, :, 0], torch.stack(wanted))
        answers.append((mean.detach(), gradient))
    for one, other in zip(*answers, strict=True):
        assert (one - other).norm() > 0.1 * one.norm()


@pytest.mark.parametrize("seed", ["1", 1.5, 2**31])
def test_wrong_seeds_are_refused(seed) -> None:
    with pytest.raises(ArgumentError, match="seed"):
        Sketch(4, seed=seed)
