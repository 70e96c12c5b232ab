"""Choosing a kernel: the first row that can serve and pays, or the pinned one, or a sentence why not."""

from __future__ import annotations

from dataclasses import replace

from kalmix.errors import KernelError
from kalmix.ops._shared.kernel import TRANSFORMS, Call, Kernel
from kalmix.validation import transformed


def select(op: str, kernels: tuple[Kernel, ...], call: Call, pinned: str | None = None) -> Kernel:
    """The kernel that serves `call`: `pinned` by name, else the first of `kernels` (best first) that can and pays.

    Inside a transform of `torch.func`, or forward-mode differentiation, only kernels of plain autograd can.

    Raises:
        KernelError: `pinned` is unknown or cannot serve, or nothing can; names one that can.
    """
    if transformed():
        call = replace(call, needs=call.needs | {TRANSFORMS})
    able = [kernel for kernel in kernels if not kernel.interpretable(call) and kernel.refuses(call) is None]
    if pinned is None:
        if able:
            return next((kernel for kernel in able if kernel.pays(call)), able[-1])
        reasons = "; ".join(f"{kernel.name}: {kernel.refuses(call)}" for kernel in kernels)
        raise KernelError(f"no kernel of `{op}` can serve this call ({reasons})")
    names = [kernel.name for kernel in kernels]
    if not isinstance(pinned, str) or pinned not in names:
        raise KernelError(f"`{op}` has no kernel {pinned!r}; it has {', '.join(names)}")
    kernel = kernels[names.index(pinned)]
    refusal = kernel.refuses(call)
    if refusal is not None:
        instead = f"; use {able[-1].name!r}" if able else ""
        raise KernelError(f"kernel {pinned!r} of `{op}` cannot serve this call: {refusal}{instead}")
    return kernel
