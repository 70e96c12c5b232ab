"""Custom ops of PyTorch, which its compiler does not trace into, and their gradients, which are of first order.

A backward pass that is written by hand cannot be differentiated again. `torch.autograd.function.once_differentiable`
refuses that only where an upstream gradient requires one, and only if nothing else leads to the same input: otherwise
PyTorch returns a part of the second derivative. So these backward passes refuse `create_graph=True`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

from kalmix.errors import KernelError

Function = Callable[..., Any]
REFERENCE = "kernel='reference'"


def custom_op(name: str, function: Function, fake: Function) -> Any:
    """Register a function as a custom op, and return the op.

    `torch.library.custom_op` does the same, but its ops import the compiler when they first run, which takes two
    seconds.

    Args:
        name: "kalmix::" and the name in `torch.ops.kalmix`.
        function: changes none of its arguments and returns none of them. Its annotations make the schema.
        fake: takes the same arguments, returns empty tensors of the shapes and dtypes that `function` returns.
    """
    schema = torch.library.infer_schema(unwrap(function), mutates_args=())
    torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, "CompositeExplicitAutograd")(function)
    torch.library.register_fake(name, fake)
    space, own = name.split("::")
    return getattr(getattr(torch.ops, space), own).default


def filter_op(name: str, forward: Function, fake: Function, backward: Function, *, outputs: int, kernel: str) -> Any:
    """Register a filter as a custom op and its backward pass as another, `<name>_backward`; return the first.

    Args:
        name, fake: as for `custom_op`.
        forward: takes signals, the tensors of the belief before, `rows`, and options. Returns what it reads and the
            tensors of the belief after, and then what it stores for `backward`.
        backward: takes signals, what `forward` stored, `rows`, gradients of the outputs, and those of the options that
            it names. Returns gradients of the signals (any tensor for one that is `None`) and of the belief before.
            Where it accepts `None` for the gradient of an output, it gets `None` if there is none; otherwise 0.
        outputs: how many results of `forward` have gradients; the others are stored.
        kernel: the kernel, as errors name it.
    """
    op = custom_op(name, forward, fake)
    names, taken = [x.name for x in op._schema.arguments], unwrap(backward).__annotations__
    rows = names.index("rows")
    signals = sum(x in taken for x in names[:rows])
    options = [i for i, x in enumerate(names) if i > rows and x in taken]
    begin = signals + len(op._schema.returns) - outputs + 1  # of gradients, among the arguments of `backward`

    def backward_fake(*inputs: Any) -> tuple[Tensor, ...]:
        after = inputs[begin : begin + outputs][signals - rows :]  # the belief after has the shapes of that before
        like = [inputs[0].new_empty(0) if x is None else x for x in (*inputs[:signals], *after)]
        return tuple(x.new_empty(x.shape) for x in like)

    back = custom_op(f"{name}_backward", backward, backward_fake)
    optional = [isinstance(x.type, torch.OptionalType) for x in back._schema.arguments[begin : begin + outputs]]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:signals], *output[outputs:], inputs[rows])
        ctx.mark_non_differentiable(*output[outputs:])
        ctx.set_materialize_grads(False)
        ctx.like = [(x.shape, x.dtype) for x in output[:outputs]]
        ctx.options = [inputs[i] for i in options]

    def gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        given: list[Tensor | None] = []
        for grad, (shape, dtype), none in zip(grads[:outputs], ctx.like, optional, strict=True):
            if none:
                given.append(grad if grad is not None and grad.numel() else None)
            else:
                given.append(saved[0].new_zeros((), dtype=dtype).expand(shape) if grad is None else grad)
        found = back(*saved, *given, *ctx.options)
        of_signals = (None if x is None else grad for x, grad in zip(saved, found[:signals], strict=False))
        return *of_signals, *found[signals:], *[None] * (len(names) - rows)

    register_backward(op, kernel, setup, gradients)
    return op


def register_backward(op: Any, kernel: str, setup: Function, backward: Function) -> None:
    """Register the backward pass of an op; see `once_differentiable` for `kernel`."""
    torch.library.register_autograd(op, once_differentiable(kernel)(backward), setup_context=setup)


def once_differentiable(what: str, instead: str = REFERENCE) -> Callable[[Function], Function]:
    """Make a backward pass raise if its result is to be differentiated, that is under `create_graph=True`.

    Args:
        what: the kernel, as the error names it.
        instead: what has second derivatives.
    """

    def decorate(backward: Function) -> Function:
        @wraps(backward)
        def checked(ctx: Any, *grads: Any) -> Any:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # a compiler refuses it itself
                raise KernelError(
                    f"{what} has first derivatives only, but create_graph=True asks for second ones; use {instead}"
                )
            return backward(ctx, *grads)

        return checked

    return decorate


def needs_grad(*tensors: Tensor | None) -> bool:
    """Return whether a backward pass may follow for any of these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def precompiled(rehearsal: Function, forward: Function) -> Function:
    """Let `forward` compile all Triton kernels that a call of `rehearsal` runs, before the first call of its kind.

    Both take the same arguments; `rehearsal` also calls the backward pass.
    """

    @wraps(forward)
    def run(*inputs: Any) -> Any:
        from kalmix.ops._shared.triton.compile_and_launch import rehearse

        with torch.cuda.device_of(inputs[0]):
            rehearse(rehearsal, *inputs)
            return forward(*inputs)

    return run


def launched(function: Function) -> Function:
    """Find the Triton kernels of `function` once for all calls that are laid out alike; see `perform`."""

    @wraps(function)
    def run(*inputs: Any) -> Any:
        from kalmix.ops._shared.triton.compile_and_launch import perform

        with torch.cuda.device_of(inputs[0]):
            return perform(function, *inputs)

    return run
