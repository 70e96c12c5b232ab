"""Custom operators of PyTorch, which `torch.compile` does not trace into, with first-order gradients.

A backward pass written by hand cannot be differentiated again. `torch.autograd.function.once_differentiable` detects an
attempt only if an upstream gradient requires a gradient and no other path leads to the same input; otherwise PyTorch
silently returns one part of the second derivative. The backward passes registered here raise under `create_graph=True`.
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
    """Register a function as a custom op and return the op.

    `torch.library.custom_op` does the same, but its ops import the compiler in their first call, which takes seconds.

    Args:
        name: qualified name, such as "kalmix::diagonal_triton".
        function: implementation. It must neither modify nor return its arguments; its annotations define the schema.
        fake: function of the same arguments that returns empty tensors of the shapes and dtypes of the results.
    """
    schema = torch.library.infer_schema(unwrap(function), mutates_args=())
    torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, "CompositeExplicitAutograd")(function)
    torch.library.register_fake(name, fake)
    space, own = name.split("::")
    return getattr(getattr(torch.ops, space), own).default


def register_filter_op(
    name: str, forward: Function, fake: Function, backward: Function, *, outputs: int, kernel: str
) -> Any:
    """Register a filter as a custom op, and its backward pass as the custom op `<name>_backward`; return the first.

    Args:
        name, fake: see `custom_op`.
        forward: function of the signals, the tensors of the incoming belief, `rows`, and options. Returns the read-out,
            the tensors of the final belief, and then tensors stored for `backward`.
        backward: function of the signals, the stored tensors, `rows`, the gradients of the outputs, and those options
            that it names. Returns gradients of the signals (any tensor for one that is `None`) and of the incoming
            belief. A missing output gradient is `None` if the annotation allows it, otherwise zeros.
        outputs: number of results of `forward` that have gradients; the others are stored.
        kernel: name of the kernel in error messages.
    """
    op = custom_op(name, forward, fake)
    names, backward_names = [x.name for x in op._schema.arguments], unwrap(backward).__annotations__
    rows = names.index("rows")
    signals = sum(x in backward_names for x in names[:rows])
    options = [i for i, x in enumerate(names) if i > rows and x in backward_names]
    begin = signals + len(op._schema.returns) - outputs + 1  # index of the first output gradient

    def backward_fake(*inputs: Any) -> tuple[Tensor, ...]:
        belief = inputs[begin : begin + outputs][signals - rows :]  # it has the shapes of the incoming one
        like = [inputs[0].new_empty(0) if x is None else x for x in (*inputs[:signals], *belief)]
        return tuple(x.new_empty(x.shape) for x in like)

    backward_op = custom_op(f"{name}_backward", backward, backward_fake)
    optional = [isinstance(x.type, torch.OptionalType) for x in backward_op._schema.arguments[begin : begin + outputs]]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:signals], *output[outputs:], inputs[rows])
        ctx.mark_non_differentiable(*output[outputs:])
        ctx.set_materialize_grads(False)
        ctx.like = [(x.shape, x.dtype) for x in output[:outputs]]
        ctx.options = [inputs[i] for i in options]

    def gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        output_grads: list[Tensor | None] = []
        for grad, (shape, dtype), may_be_none in zip(grads[:outputs], ctx.like, optional, strict=True):
            if may_be_none:
                output_grads.append(grad if grad is not None and grad.numel() else None)
            else:
                output_grads.append(saved[0].new_zeros((), dtype=dtype).expand(shape) if grad is None else grad)
        results = backward_op(*saved, *output_grads, *ctx.options)
        signal_grads = (None if x is None else grad for x, grad in zip(saved, results[:signals], strict=False))
        return *signal_grads, *results[signals:], *[None] * (len(names) - rows)

    register_backward(op, kernel, setup, gradients)
    return op


def recomputed_op(name: str, function: Function, fake: Function, kernel: str) -> Any:
    """Register a differentiable function as a custom op whose backward pass runs the function again with autograd.

    It serves loops over tokens under `torch.compile`, which would unroll them. Eager code calls the function itself,
    which has derivatives of every order.

    Args:
        name: qualified name, such as "kalmix::attend_radial".
        function: takes a list of tensors and a list of integers; returns a list of new tensors.
        fake: function of the same arguments that returns empty tensors of the shapes and dtypes of the results.
        kernel: name of the function in error messages.

    Returns:
        The registered op, which takes and returns lists as `function` does. It has first derivatives only.

    Example:
        >>> from kalmix.ops import recomputed_op
        >>> def multiply(tensors, options):
        ...     return [x * options[0] for x in tensors]
        >>> def multiply_fake(tensors, options):
        ...     return [torch.empty_like(x) for x in tensors]
        >>> op = recomputed_op("example::multiply", multiply, multiply_fake, "multiply")
        >>> op([torch.ones(2)], [3])
        [tensor([3., 3.])]
    """

    def forward(tensors: list[Tensor], options: list[int]) -> list[Tensor]:
        return [x.contiguous() for x in function(tensors, options)]

    def backward(
        tensors: list[Tensor], grads: list[Tensor | None], needed: list[bool], options: list[int]
    ) -> list[Tensor]:
        with _dispatch_to_autograd(), torch.enable_grad():
            leaves = [x.detach().requires_grad_(y) for x, y in zip(tensors, needed, strict=True)]
            pairs = zip(function(leaves, options), grads, strict=True)
            outputs, output_grads = zip(*((x, y) for x, y in pairs if y is not None and x.requires_grad), strict=True)
            inputs = [x for x in leaves if x.requires_grad]
            found = torch.autograd.grad(outputs, inputs, output_grads, materialize_grads=True)
        return [x.contiguous() for x in found]

    def backward_fake(tensors, grads, needed, options):
        return [x.new_empty(x.shape) for x, y in zip(tensors, needed, strict=True) if y]

    op = custom_op(name, forward, fake)
    backward_op = custom_op(f"{name}_backward", backward, backward_fake)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        tensors, ctx.options = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    def gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[list[Tensor | None], None]:
        needed = ctx.needs_input_grad[0]
        found = iter(backward_op(ctx.saved_tensors, grads, needed, ctx.options))
        return [next(found) if x else None for x in needed], None

    register_backward(op, kernel, setup, gradients)
    return op


def _dispatch_to_autograd() -> Any:
    """Return a context in which autograd records operations, even inside the implementation of an op."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    return torch._C._ForceDispatchKeyGuard(included, excluded)


def register_backward(op: Any, kernel: str, setup: Function, backward: Function) -> None:
    """Register the backward pass of a custom op; see `once_differentiable` for `kernel`."""
    torch.library.register_autograd(op, once_differentiable(kernel)(backward), setup_context=setup)


def once_differentiable(name: str, alternative: str = REFERENCE) -> Callable[[Function], Function]:
    """Make a backward pass raise `KernelError` under `create_graph=True`.

    Args:
        name: name of the kernel in the error message.
        alternative: phrase that names an implementation with second derivatives.
    """

    def decorate(backward: Function) -> Function:
        @wraps(backward)
        def checked(ctx: Any, *grads: Any) -> Any:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # torch.compile raises its own error
                raise KernelError(
                    f"{name} has first derivatives only, but create_graph=True asks for second ones; use {alternative}"
                )
            return backward(ctx, *grads)

        return checked

    return decorate


def needs_grad(*tensors: Tensor | None) -> bool:
    """Return whether autograd is enabled and any of the tensors requires a gradient."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def with_precompilation(dry_run: Function, forward: Function) -> Function:
    """Wrap `forward` so that the first call of each size class compiles the Triton kernels of `dry_run` in parallel.

    `dry_run` takes the arguments of `forward`, and calls both the forward and the backward pass.
    """

    @wraps(forward)
    def run(*inputs: Any) -> Any:
        from kalmix.ops._shared.triton.compile_and_launch import precompile

        with torch.cuda.device_of(inputs[0]):
            precompile(dry_run, *inputs)
            return forward(*inputs)

    return run


def with_launch_cache(function: Function) -> Function:
    """Wrap `function` so that calls of equal layout reuse their compiled Triton kernels; see `launch_cached`."""

    @wraps(function)
    def run(*inputs: Any) -> Any:
        from kalmix.ops._shared.triton.compile_and_launch import launch_cached

        with torch.cuda.device_of(inputs[0]):
            return launch_cached(function, *inputs)

    return run
