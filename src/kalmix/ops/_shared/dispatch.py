"""Kernel selection, and the cache of checked calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.errors import KernelError
from kalmix.ops._shared.constants import can_share_constants
from kalmix.ops._shared.kernel import TRANSFORMS, Kernel, KernelRequest
from kalmix.validation import in_transform, is_eager, value_checks

MAX_CHECKED_CALLS = 1024  # signatures of calls that are stored


class CheckedCall(NamedTuple):
    """Call of an op whose arguments are valid.

    Attributes:
        kernel: the kernel that runs it.
        belief: the prior.
        is_empty: whether an axis has size 0. Kernels may assume that there are tokens, sequences, heads and columns.
    """

    kernel: Kernel
    belief: Any
    is_empty: bool


def checked_call(check: Callable[..., Any], signals: tuple[Any, ...], belief: Any, segments: Any, *options: Any) -> Any:
    """Return `check(signals, belief, segments, *options)`, from a cache if possible: a `CheckedCall` or similar.

    The cache is used in eager code where values are not checked. Its keys are the shapes, dtypes and devices of
    tensors, and all other arguments.
    """
    if torch.compiler.is_compiling():  # tested first, so that `torch.compile` traces nothing else
        return check(signals, belief, segments, *options)
    signature = None
    if is_eager() and type(signals[0]) in _PLAIN_TENSORS and not value_checks(signals[0].device):
        signature = _signature((check, signals, belief, segments, *options))
    call = None if signature is None else _CHECKED_CALLS.get(signature)
    if call is None:
        call = check(signals, belief, segments, *options)
        stores = signature is not None and call.kernel.triton and can_share_constants(signals[0].device)
        if stores and (belief is not None or not any(x.is_inference() for x in call.belief)):
            if len(_CHECKED_CALLS) >= MAX_CHECKED_CALLS:
                _CHECKED_CALLS.clear()
            _CHECKED_CALLS[signature] = call if belief is None else _with_belief(call, None)
    return call if belief is None else _with_belief(call, belief)


_PLAIN_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_CHECKED_CALLS: dict[Any, Any] = {}


def _with_belief(call: Any, belief: Any) -> Any:
    return type(call)(call.kernel, belief, *call[2:])


def _signature(arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return what a check of arguments may depend on, without values of tensors; `None` if that is not known."""
    signature: list[Any] = []
    for x in arguments:
        kind = type(x)
        if kind in _PLAIN_TENSORS:
            signature.append((x.shape, x.dtype, x.device, x.layout))
            continue
        part = _signature(x) if isinstance(x, tuple) else x
        if kind.__hash__ is None or isinstance(x, Tensor) or (part is None and x is not None):
            return None
        signature.append((kind, part))
    return tuple(signature)


def select_kernel(op: str, kernels: tuple[Kernel, ...], request: KernelRequest, name: str | None = None) -> Kernel:
    """Return the kernel called `name` or, if `None`, the first supported kernel that dispatch prefers.

    Inside a `torch.func` transform or forward-mode differentiation, a kernel also needs the feature `TRANSFORMS`.

    Args:
        op: name of the op, for error messages.
        kernels: the kernels of the op, best first. If none that supports the call is preferred, the last of them runs.
        request: properties of the call.
        name: name of the requested kernel, or `None`.

    Raises:
        KernelError: `name` is unknown or that kernel does not support the call, or none does; gives the reasons and
            the name of a kernel that does.
    """
    if in_transform():
        request = replace(request, required_features=request.required_features | {TRANSFORMS})
    supported = [x for x in kernels if not x.needs_interpreter(request) and x.unsupported_reason(request) is None]
    if name is None:
        if supported:
            return next((kernel for kernel in supported if kernel.is_preferred(request)), supported[-1])
        reasons = "; ".join(f"{kernel.name}: {kernel.unsupported_reason(request)}" for kernel in kernels)
        raise KernelError(f"no kernel of `{op}` supports this call ({reasons})")
    names = [kernel.name for kernel in kernels]
    if not isinstance(name, str) or name not in names:
        raise KernelError(f"`{op}` has no kernel {name!r}; it has {', '.join(names)}")
    kernel = kernels[names.index(name)]
    reason = kernel.unsupported_reason(request)
    if reason is not None:
        alternative = f"; use {supported[-1].name!r}" if supported else ""
        raise KernelError(f"kernel {name!r} of `{op}` does not support this call: {reason}{alternative}")
    return kernel
