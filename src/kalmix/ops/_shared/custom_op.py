"""Functions as ops of PyTorch, which its compiler takes whole, and their gradients, which are of first order.

A backward pass that is written by hand cannot be differentiated again. `torch.autograd.function.once_differentiable`
refuses that only where an upstream gradient requires one, and only if nothing else leads to the same input: otherwise
PyTorch returns a part of the second derivative. So these backward passes refuse `create_graph=True`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from kalmix.errors import KernelError

Backward = Callable[..., Any]  # (ctx, *grads) -> gradients of the inputs
REFERENCE = "kernel='reference'"


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Make an op of a function that changes none of its arguments and returns none of them.

    What `torch.library.custom_op` makes, but ops made by that import the compiler when they first run, which takes two
    seconds. `torch.library` registers what compilers and gradients need, by the op.
    """

    def register(function: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(function, mutates_args=())
        torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(name, "CompositeExplicitAutograd")(function)
        space, own = name.split("::")
        return getattr(getattr(torch.ops, space), own).default

    return register


def once_differentiable(what: str, instead: str = REFERENCE) -> Callable[[Backward], Backward]:
    """Make a backward pass raise if its result is to be differentiated, that is under `create_graph=True`.

    Args:
        what: the kernel, as the error names it.
        instead: what has second derivatives.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def checked(ctx: Any, *grads: Any) -> Any:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # a compiler refuses it itself
                raise KernelError(
                    f"{what} has first derivatives only, but create_graph=True asks for second ones; use {instead}"
                )
            return backward(ctx, *grads)

        return checked

    return decorate


def register_backward(op: Any, what: str, backward: Backward, setup_context: Callable[..., None]) -> None:
    """Register the backward pass of an op; see `once_differentiable` for `what`."""
    torch.library.register_autograd(op, once_differentiable(what)(backward), setup_context=setup_context)
