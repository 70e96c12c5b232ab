"""Backward passes of parts: a Triton kernel for first derivatives, PyTorch under `create_graph=True`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kalmix.ops._shared.custom_op import without_dispatcher

Function = Callable[..., Any]


def register_gradients(op: Any, setup: Function, backward: Function, differentiable: Function) -> Function:
    """Register the backward pass of a custom op; return the op as `without_dispatcher` does.

    Args:
        op: the op.
        setup: function of the context, the inputs and the outputs that stores what the backward pass needs.
        backward: function of the context and the output gradients (`None` if there is none) that returns one gradient
            or `None` per input.
        differentiable: like `backward`, in operations that autograd differentiates; called under `create_graph=True`.
    """

    def prepare(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        setup(ctx, inputs, output)

    def gradients(ctx: Any, *grads: Tensor | None) -> Any:
        creates_graph = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return (differentiable if creates_graph else backward)(ctx, *grads)

    torch.library.register_autograd(op, gradients, setup_context=prepare)
    differentiated, plain = without_dispatcher(op, prepare, gradients), without_dispatcher(op)

    def run(*inputs: Any) -> Any:
        return (differentiated if torch.is_grad_enabled() else plain)(*inputs)

    return run


def differentiate(
    function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Run `function` and differentiate it, so that autograd can differentiate the result again.

    Args:
        function: takes `inputs`, returns one tensor per output gradient.
        inputs: tensors, or `None`.
        grads: gradient of each output, or `None`.

    Returns:
        One gradient per input; `None` if the input is `None`, requires no gradient or has none.
    """
    with torch.enable_grad():
        aliases = [None if x is None else x.view_as(x) for x in inputs]  # separates inputs that are one tensor
        pairs = [(y, g) for y, g in zip(function(*aliases), grads, strict=True) if g is not None and y.requires_grad]
        wanted = [x for x in aliases if x is not None and x.requires_grad]
        if not pairs or not wanted:
            return [None] * len(aliases)
        outputs, output_grads = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, wanted, output_grads, create_graph=True, allow_unused=True))
    return [next(found) if x is not None and x.requires_grad else None for x in aliases]
