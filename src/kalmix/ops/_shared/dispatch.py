"""Kernel selection."""

from __future__ import annotations

from dataclasses import replace

from kalmix.errors import KernelError
from kalmix.ops._shared.kernel import TRANSFORMS, Kernel, KernelRequest
from kalmix.validation import in_transform


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
