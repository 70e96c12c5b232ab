"""Recomputation of a part's output in the backward pass, so that it is not stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from kalmix.layers.fused.dispatch import uses_triton


class _Recomputation(NamedTuple):
    """Hooks that replace one tensor among those that autograd stores.

    Attributes:
        part: function that computes the tensor.
        address: address of its data.
        elements: number of its elements.
        dtype: its dtype.
        autocast: arguments of `torch.autocast` in the forward pass.
    """

    part: Callable[[], Tensor]
    address: int
    elements: int
    dtype: torch.dtype
    autocast: dict[str, Any]

    def pack(self, x: Tensor) -> Tensor | torch.Size:
        """Return the shape of the tensor in place of its data; it may be saved in another shape than it has."""
        same = x.data_ptr() == self.address and x.numel() == self.elements and x.dtype == self.dtype
        return x.shape if same and x.is_contiguous() else x

    def unpack(self, x: Tensor | torch.Size) -> Tensor:
        """Compute the tensor again."""
        if isinstance(x, Tensor):
            return x
        with torch.no_grad(), torch.autocast(**self.autocast):
            return self.part().view(x)


def without_storing(part: Callable[[], Tensor], module: Callable[[Tensor], Tensor], y: Tensor | None = None) -> Tensor:
    """Return `module(part())`; the backward pass calls `part` again instead of storing its output.

    Linear layers store their input for the gradient of the weight. This function drops that copy, at the price of one
    more run of the part. It stores the output where parts run in their eager form, under `torch.compile`, which decides
    about recomputation itself, and where other hooks for saved tensors are active, such as gradient checkpointing's.

    Args:
        part: function without arguments that returns a contiguous tensor; always the same one.
        module: function of that tensor, such as a linear layer.
        y: the output of `part`, if the caller has computed it.

    Example:
        >>> from kalmix.layers.fused import swiglu, without_storing
        >>> x, linear = torch.randn(2, 8), torch.nn.Linear(4, 3)
        >>> without_storing(lambda: swiglu(x), linear).shape
        torch.Size([2, 3])
    """
    y = part() if y is None else y
    if not (uses_triton("without_storing", y) and y.requires_grad and y.is_contiguous() and _may_add_hooks()):
        return module(y)
    device = y.device.type
    autocast = {"dtype": torch.get_autocast_dtype(device), "enabled": torch.is_autocast_enabled(device)}
    hooks = _Recomputation(part, y.data_ptr(), y.numel(), y.dtype, {"device_type": device, **autocast})
    with saved_tensors_hooks(hooks.pack, hooks.unpack):
        return module(y)


def _may_add_hooks() -> bool:
    """Return whether no hooks for saved tensors are active, except those of `without_storing`."""
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    active = autograd._top_saved_tensors_default_hooks(False)
    return active is None or isinstance(getattr(active[0], "__self__", None), _Recomputation)
