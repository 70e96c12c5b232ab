"""Parts that the updates of several ops share: argument checks, and products that no setting of torch rounds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix.ops._shared.custom_op import needs_grad
from kalmix.ops._shared.dispatch import select_kernel
from kalmix.ops._shared.kernel import Kernel, KernelRequest
from kalmix.ops._shared.validation import check_heads
from kalmix.segments import Segments, check_segments
from kalmix.types import belief_dtype
from kalmix.validation import FLOATS, check_dtype_and_device, check_range, check_shape, is_eager


def check_update_tokens(k: Tensor, v: Tensor, segments: Segments | None) -> dict[str, int]:
    """Check k `[B, T, H, K]`, v `[B, T, G, V]` and the segments; return the sizes by letter, N included."""
    sizes: dict[str, int] = {}
    for name, signal, layout in (("k", k, "B T H K"), ("v", v, "B T G V")):
        check_shape(name, signal, layout, sizes)
        check_dtype_and_device(name, signal, FLOATS if name == "k" else (k.dtype,), k.device)
        check_range(name, signal)
    check_heads(sizes)
    sizes["N"] = check_segments(segments, sizes["B"], sizes["T"], k.device)
    return sizes


def to_state_dtype(like: Tensor, *signals: Any) -> list[Any]:
    """Convert signals in the dtype of `like` to that of its belief; others are returned unchanged.

    An update is applied to beliefs of any size, so its matrices must not be rounded to half precision.
    """
    dtype = belief_dtype(like.dtype)
    return [x.to(dtype) if isinstance(x, Tensor) and x.dtype == like.dtype else x for x in signals]


def uses_triton(op: str, kernels: tuple[Kernel, ...], k: Tensor, v: Tensor, *signals: Tensor | None) -> bool:
    """Return whether a Triton kernel would filter these signals, in eager code and without gradients."""
    if torch.compiler.is_compiling() or not is_eager() or needs_grad(k, v, *signals):
        return False
    request = KernelRequest(k.device.type, k.dtype, k.shape[3], v.shape[3], k.shape[1])
    return select_kernel(op, kernels, request).triton


def identity_matrix(like: Tensor, width: int) -> Tensor:
    """Return identity matrices `[N, G, width, width]`, N and G as in `like`, in its dtype."""
    return torch.eye(width, dtype=like.dtype, device=like.device).expand(*like.shape[:2], width, width)


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """Compute a matrix product in float64, which neither TF32 nor autocast rounds, in either direction."""
    return x.double() @ y.double()


def total_decay(v: Tensor, log_decay: Tensor | None, sizes: dict[str, int], segments: Segments | None) -> Tensor:
    """Return the product of the decays of each sequence, `[N, G, K or 1, 1]`."""
    if log_decay is None:
        return v.new_ones(sizes["N"], sizes["G"], 1, 1)
    rows = log_decay if log_decay.ndim == 4 else log_decay[..., None]
    return sum_tokens(rows.double(), sizes["N"], segments).exp().to(v.dtype)[..., None]


def sum_tokens(x: Tensor, sequences: int, segments: Segments | None) -> Tensor:
    """Sum `[B, T, ...]` over the tokens of each sequence, to `[N, ...]`."""
    if segments is None:
        return x.sum(1)
    segment_ids = segments.segment_ids(*x.shape[:2])
    inside = (segment_ids >= 0).view(*x.shape[:2], *[1] * (x.ndim - 2))
    x = torch.where(inside, x, 0.0).flatten(0, 1)
    total = x.new_zeros(max(sequences, 1), *x.shape[1:]).index_add(0, segment_ids.clamp(min=0).flatten(), x)
    return total[:sequences]
