"""Custom operators of PyTorch, which `torch.compile` does not trace into, with first-order gradients.

A backward pass written by hand cannot be differentiated again. `torch.autograd.function.once_differentiable` detects an
attempt only if an upstream gradient requires a gradient and no other path leads to the same input; otherwise PyTorch
silently returns one part of the second derivative. The backward passes registered here raise under `create_graph=True`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from inspect import signature, unwrap
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from kalmix.errors import ArgumentError, KernelError
from kalmix.ops._shared.constants import filled
from kalmix.types import without_autocast
from kalmix.validation import in_transform, is_eager

Function = Callable[..., Any]
REFERENCE = "kernel='reference'"
UNCOMPILED = "uncompiled code"
OP_FUNCTIONS: dict[Any, Function] = {}  # function of each op of `custom_op`


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
    op = getattr(getattr(torch.ops, space), own).default
    OP_FUNCTIONS[op] = function
    return op


def register_filter_op(
    name: str,
    forward: Function,
    fake: Function,
    backward: Function,
    *,
    outputs: int,
    kernel: str,
    prior: Function | None = None,
    backward_fake: Function | None = None,
) -> Any:
    """Register a filter as a custom op, and its backward pass as the custom op `<name>_backward`.

    Return the first, as a function that `without_dispatcher` made.

    Args:
        name, fake: see `custom_op`.
        forward: function of the signals, the tensors of the incoming belief, `rows`, and options. Returns the read-out,
            the tensors of the final belief, and then tensors stored for `backward`.
        backward: function of the signals, the stored tensors, `rows`, the gradients of the outputs, and those options
            that it names. Returns gradients of the signals (any tensor for one that is `None`) and of the incoming
            belief. A missing output gradient is `None` if the annotation allows it, otherwise zeros.
        outputs: number of results of `forward` that have gradients; the others are stored.
        kernel: name of the kernel in error messages.
        prior: function of the arguments of `backward` that returns the gradients of the incoming belief alone, as a
            tuple. It is called where a `PriorSwitch` is on, in eager code.
        backward_fake: function of the arguments of `backward` that returns empty tensors like its results. Default:
            tensors like the signals and the gradients of the final belief, which must not be `None` then.
    """
    op = custom_op(name, forward, fake)
    names, backward_names = [x.name for x in op._schema.arguments], unwrap(backward).__annotations__
    rows = names.index("rows")
    signals = sum(x in backward_names for x in names[:rows])
    options = [i for i, x in enumerate(names) if i > rows and x in backward_names]
    begin = signals + len(op._schema.returns) - outputs + 1  # index of the first output gradient

    def gradients_like_inputs(*inputs: Any) -> tuple[Tensor, ...]:
        belief = inputs[begin : begin + outputs][signals - rows :]  # it has the shapes of the incoming one
        like = [inputs[0].new_empty(0) if x is None else x for x in (*inputs[:signals], *belief)]
        return tuple(x.new_empty(x.shape) for x in like)

    backward_op = custom_op(f"{name}_backward", backward, backward_fake or gradients_like_inputs)
    run_backward = without_dispatcher(backward_op)
    optional = [isinstance(x.type, torch.OptionalType) for x in backward_op._schema.arguments[begin : begin + outputs]]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:signals], *output[outputs:], inputs[rows])
        ctx.mark_non_differentiable(*output[outputs:])
        ctx.set_materialize_grads(False)
        ctx.like = [(x.shape, x.dtype) for x in output[:outputs]]
        ctx.options = [inputs[i] for i in options]
        ctx.prior_switch = _PRIOR_SWITCH.get()

    def gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        output_grads: list[Tensor | None] = []
        for grad, (shape, dtype), may_be_none in zip(grads[:outputs], ctx.like, optional, strict=True):
            if may_be_none:
                output_grads.append(grad if grad is not None and grad.numel() else None)
            elif grad is None:
                output_grads.append(filled(0.0, shape, dtype, saved[0].device))
            else:
                output_grads.append(grad)
        switch: PriorSwitch | None = ctx.prior_switch
        if prior is not None and switch is not None and switch.is_on and not torch.compiler.is_compiling():
            belief_grads = prior(*saved, *output_grads, *ctx.options)
            return *[None] * signals, *belief_grads, *[None] * (len(names) - rows)
        results = run_backward(*saved, *output_grads, *ctx.options)
        signal_grads = (None if x is None else grad for x, grad in zip(saved, results[:signals], strict=False))
        pairs = zip(results[signals:], ctx.needs_input_grad[signals:rows], strict=True)
        belief_grads = (grad if needed else None for grad, needed in pairs)
        return *signal_grads, *belief_grads, *[None] * (len(names) - rows)

    return without_dispatcher(op, setup, register_backward(op, kernel, setup, gradients))


class PriorSwitch:
    """Switch by which backward passes of some filters compute the gradients of incoming beliefs alone.

    It acts on the filters that are called inside `record`, where this is cheaper. Backward passes may run in other
    threads than the code that turns it on; so each filter stores its switch with its graph.

    Attributes:
        is_on: whether gradients other than those of incoming beliefs may be missing.

    Example:
        switch = PriorSwitch()
        with switch.record():
            mean, _, belief = ops.delta(q, k, v, belief=prior)
        with switch.turned_on():
            grads = torch.autograd.grad(mean.sum(), list(prior), retain_graph=True)
    """

    def __init__(self) -> None:
        self.is_on = False

    @contextmanager
    def record(self) -> Iterator[None]:
        """Let this switch act on the filters that are called inside."""
        previous = _PRIOR_SWITCH.set(self)
        try:
            yield
        finally:
            _PRIOR_SWITCH.reset(previous)

    @contextmanager
    def turned_on(self) -> Iterator[None]:
        """Turn the switch on; inside, call `torch.autograd.grad` for incoming beliefs only."""
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False


_PRIOR_SWITCH: ContextVar[PriorSwitch | None] = ContextVar("prior_switch", default=None)


def without_dispatcher(op: Any, setup: Function | None = None, backward: Function | None = None) -> Function:
    """Return a function that runs a custom op and, in plain eager code, calls its implementation instead.

    PyTorch's dispatcher would add to the time of every call. It is needed under `torch.compile`, and where a mode, a
    transform or a tensor subclass intercepts ops.

    Args:
        op: result of `custom_op`.
        setup, backward: its backward pass as `torch.library.register_autograd` takes it; `None` if it has none.
    """
    function = OP_FUNCTIONS[op]

    class EagerCall(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            output = function(*inputs)
            assert setup is not None
            setup(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            assert backward is not None
            return backward(ctx, *grads)

    run_eagerly = function if backward is None else EagerCall.apply

    def run(*inputs: Any) -> Any:
        # Test for compilation first: `torch.compile` then traces nothing else.
        if torch.compiler.is_compiling() or not _is_plain_call(inputs):
            return op(*inputs)
        return run_eagerly(*inputs)

    return run


_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, NoneType, bool, int, float, str, torch.dtype})


def _is_plain_call(inputs: Sequence[Any]) -> bool:
    """Return whether nothing but autograd needs to know of an op that is called with `inputs`."""
    return is_eager() and (_PLAIN_TYPES.issuperset(map(type, inputs)) or all(map(_is_plain, inputs)))


def _is_plain(x: Any) -> bool:
    return all(map(_is_plain, x)) if type(x) is list else type(x) in _PLAIN_TYPES


def recomputed_op(name: str, function: Function, fake: Function, kernel: str) -> Any:
    """Register a differentiable function as a custom op whose backward pass runs the function again with autograd.

    Use the op in compiled code: `torch.compile` would unroll a loop over tokens, but it does not trace into an op. In
    eager code call `function` itself, which has derivatives of every order. The op does not choose between the two;
    test `torch.compiler.is_compiling()`.

    Args:
        name: qualified name, "namespace::name", such as "kalmix::attend_radial". A process can register it once.
        function: takes a list of tensors and a list of integers; returns a list or tuple of new tensors. It must not
            modify or return its arguments or views of them; this is not checked.
        fake: function of the same arguments that returns empty tensors of the shapes and dtypes of the results. PyTorch
            calls it where it needs shapes only.
        kernel: phrase (not the name of a kernel) that names the op in the messages of `KernelError`, such as
            "`attend_radial` when compiled".

    Returns:
        The registered op, which takes the arguments of `function` and returns a list. `backward()` and
        `torch.autograd.grad` compute its gradients of first order. It raises `KernelError` for gradients of higher
        order and for forward-mode derivatives. PyTorch raises `RuntimeError` for other transforms of `torch.func`
        (`grad`, `jacrev`, `vmap`), and for arguments that are not such lists.

    Raises:
        ArgumentError: `name` has another form or is registered already, or `function` or `fake` is not callable. The op
            raises it if `function` returns neither a list nor a tuple.

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

    _check_new_name(name)
    for argument, value in (("function", function), ("fake", fake)):
        if not callable(value):
            raise ArgumentError(argument, got=f"a {type(value).__name__}", expected="a function")

    def forward(tensors: list[Tensor], options: list[int]) -> list[Tensor]:
        if in_transform():  # forward mode would drop tangents silently
            raise KernelError(f"{kernel} does not support forward-mode derivatives; use {UNCOMPILED}")
        results = function(tensors, options)
        if not isinstance(results, list | tuple):
            raise ArgumentError("function", problem=f"returns a {type(results).__name__}", expected="a list of tensors")
        return [x.contiguous() for x in results]

    def backward(
        tensors: list[Tensor], grads: list[Tensor | None], needed: list[bool], options: list[int]
    ) -> list[Tensor]:
        # `backward()` may be called under autocast, also where the function ran without it.
        with without_autocast(tensors[0].device), _dispatch_to_autograd(), torch.enable_grad():
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

    def gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[list[Tensor | None], list[None] | None]:
        needed = ctx.needs_input_grad[0]
        found = iter(backward_op(ctx.saved_tensors, grads, needed, ctx.options))
        no_grads = None if ctx.options else []  # PyTorch takes an empty list for a list of tensors
        return [next(found) if x else None for x in needed], no_grads

    register_backward(op, kernel, setup, gradients, UNCOMPILED)
    return op


def _check_new_name(name: str) -> None:
    """Check that `name` has the form "namespace::name", and that no op has it."""
    if not isinstance(name, str) or not re.fullmatch(r"\w+::\w+", name):
        raise ArgumentError("name", got=repr(name), expected="'namespace::name'")
    space, own = name.split("::")
    if hasattr(getattr(torch.ops, space), own):
        raise ArgumentError("name", got=f"{name!r}, which is registered already", expected="the name of a new op")


def _dispatch_to_autograd() -> Any:
    """Return a context in which autograd records operations, even inside the implementation of an op."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    return torch._C._ForceDispatchKeyGuard(included, excluded)


def register_backward(
    op: Any, kernel: str, setup: Function, backward: Function, alternative: str = REFERENCE
) -> Function:
    """Register the backward pass of a custom op, and return it with the check of `once_differentiable`.

    See there for `kernel` and `alternative`.
    """
    checked = once_differentiable(kernel, alternative)(backward)
    torch.library.register_autograd(op, checked, setup_context=setup)
    return checked


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


def with_launch_cache(
    function: Function, dry_run: Function | None = None, precompile_key: Callable[..., Hashable] | None = None
) -> Function:
    """Wrap `function` so that calls of equal layout reuse their compiled Triton kernels; see `launch_cached`.

    Args:
        function: launches kernels; its first argument is a tensor on their device.
        dry_run: takes the arguments of `function`, and calls both the forward and the backward pass. The first call of
            each size class compiles its kernels in parallel; see `precompile`.
        precompile_key: see `launch_cached`. It takes those arguments of `function` that it names.
    """
    key_of_call = None if precompile_key is None else _with_arguments_of(function, precompile_key)

    @wraps(function)
    def run(*inputs: Any) -> Any:
        from kalmix.ops._shared.triton.compile_and_launch import launch_cached

        device = inputs[0].get_device()
        if device < 0 or device == torch.cuda.current_device():
            return launch_cached(function, *inputs, dry_run=dry_run, precompile_key=key_of_call)
        with torch.cuda.device(device):
            return launch_cached(function, *inputs, dry_run=dry_run, precompile_key=key_of_call)

    return run


def _with_arguments_of(function: Function, other: Function) -> Function:
    """Return `other` as a function of all arguments of `function`, from which it takes its own by name."""
    names = list(signature(function).parameters)
    positions = [names.index(name) for name in signature(other).parameters]
    return lambda *inputs: other(*(inputs[i] for i in positions))
