"""Both forms of a part: eager on every machine, Triton on a GPU or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kalmix.layers.fused import dispatch
from kalmix.testing.nan_fill import nan_filled_memory

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Part = Callable[..., Sequence[Tensor]]


@contextmanager
def form(name: str) -> Iterator[None]:
    """Run parts in their "eager" or their "triton" form inside the context, in memory that is filled with NaN."""
    with pytest.MonkeyPatch.context() as patch, nan_filled_memory():
        patch.setattr(dispatch, "DEVICES", (DEVICE,) if name == "triton" else ())
        yield


def results(part: Part, inputs: Sequence[Tensor | None], weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs of a part, and gradients of their weighted sum with respect to all inputs."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    outputs = part(*leaves)
    loss = torch.stack([(y.double() * w).sum() for y, w in zip(outputs, weights, strict=True)]).sum()
    return [*outputs, *torch.autograd.grad(loss, [x for x in leaves if x is not None])]


def compare_forms(part: Part, inputs: Sequence[Tensor | None], dtype: torch.dtype = torch.float32) -> None:
    """Compare both forms in `dtype` with float64: outputs, and gradients of all inputs.

    In float32, the Triton form runs under gradient checkpointing, where a backward pass may read what it stored only
    once.
    """
    rounded = [None if x is None else x.to(DEVICE, dtype) for x in inputs]
    exact = [None if x is None else x.double() for x in rounded]
    weights = [torch.randn(y.shape, device=DEVICE).double() for y in part(*exact)]
    expected = results(part, exact, weights)
    checkpointed = partial(checkpoint, part, use_reentrant=False)
    for name, run in {"eager": part, "triton": checkpointed if dtype == torch.float32 else part}.items():
        with form(name):
            found = results(run, rounded, weights)
        for x, y in zip(found, expected, strict=True):
            assert x.dtype == dtype
            tolerance = 1e-5 if dtype == torch.float32 else 0.03  # half precision: a few roundings
            torch.testing.assert_close(
                x.double(), y, rtol=tolerance, atol=tolerance, msg=partial("{}: {}".format, name)
            )


def check_second_derivatives(part: Part, inputs: Sequence[Tensor | None]) -> None:
    """Compare gradients of gradients of the Triton form, in float32, with those of the eager form in float64."""

    def second(leaves: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        wanted = [x for x in leaves if x is not None]
        loss = torch.stack([y.double().pow(3).sum() for y in part(*leaves)]).sum()
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        return torch.autograd.grad(torch.stack([g.double().square().sum() for g in first]).sum(), wanted)

    given = [None if x is None else x.to(DEVICE).requires_grad_() for x in inputs]
    expected = second([None if x is None else x.detach().double().requires_grad_() for x in given])
    with form("triton"):
        found = second(given)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-3, atol=1e-4)
