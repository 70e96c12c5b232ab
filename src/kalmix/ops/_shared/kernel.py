"""Kernels as data: `Kernel` describes one implementation of an op, `KernelRequest` one call.

Dispatch, the laws, `kalmix doctor` and the benchmarks read the same `KERNELS` tables, so a new row is also tested.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kalmix.ops._shared import environment, gpu
from kalmix.types import Filtered, without_autocast
from kalmix.validation import FLOATS

TRANSFORMS = "torch.func transforms and forward-mode derivatives"  # a feature: see `Kernel.features`


@dataclass(frozen=True)
class KernelRequest:
    """Properties of one call that decide which kernels can run it. None depends on the values of tensors.

    Attributes:
        device: device type, such as "cuda".
        dtype: dtype of q, k and v.
        key_width, value_width: widths K and V of one key head and of one value head.
        tokens: sequence length T.
        required_features: features that the kernel must have; see `Kernel.features`.
        device_index: index of the GPU; the current GPU if `None`.
    """

    device: str
    dtype: torch.dtype
    key_width: int
    value_width: int
    tokens: int
    required_features: frozenset[str] = frozenset()
    device_index: int | None = None


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op and its requirements: a row of the op's `KERNELS` table.

    Attributes:
        name: "reference", "chunked", "triton" or "cuda".
        function: the implementation. A Triton row imports Triton when it first runs.
        devices: supported device types; empty for all.
        dtypes: supported dtypes of q, k and v.
        min_tokens: minimum sequence length for which this kernel is preferred to the rows after it.
        preferred_min_key_width: minimum key width for which this kernel is preferred to the rows after it.
        min_key_width: minimum supported key width.
        max_key_width: maximum supported key width; `None` for no limit.
        max_single_precision_key_width: maximum key width for every dtype but bfloat16; `None` for no further limit.
        features: supported optional features, as phrases that error messages print. A kernel with the feature
            `TRANSFORMS` has derivatives of every order in both modes; others have first derivatives in reverse mode.
        triton: whether the kernel needs Triton.
        unsupported_gpu: function of a GPU's index (the current GPU's if `None`) that returns the reason why this GPU
            cannot run the kernel, or `None` if it can. `torch.compile` must be able to trace it.
        narrow_key_width: maximum key width on GPUs where a program may use less than `wide_key_memory` bytes of shared
            memory; `None` for no further limit.
        wide_key_memory: see `narrow_key_width`.
        interpreted: whether Triton's interpreter can run the kernel on a CPU.
        low_precision_products: whether the kernel rounds factors of matrix products to the half-precision dtype of the
            signals, as tensor cores need. Tests then allow errors of that dtype instead of float32's.
    """

    name: str
    function: Callable[..., Filtered]
    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = FLOATS
    min_tokens: int = 1
    preferred_min_key_width: int = 1
    min_key_width: int = 1
    max_key_width: int | None = None
    max_single_precision_key_width: int | None = None
    features: frozenset[str] = frozenset()
    triton: bool = False
    unsupported_gpu: Callable[[int | None], str | None] | None = None
    narrow_key_width: int | None = None
    wide_key_memory: int = 0
    interpreted: bool = True
    low_precision_products: bool = False

    def __call__(self, signals: tuple[Any, ...], *arguments: Any) -> Filtered:
        """Run the kernel in the dtypes of its arguments.

        Autocast is disabled inside, because it would round beliefs to half precision.

        Args:
            signals: the signals of the op, q first.
            arguments: the belief, the segments, and further arguments of the op's kernels.
        """
        device = signals[0].device
        if device.type != "meta" and not torch.compiler.is_compiling() and not torch.is_autocast_enabled(device.type):
            return self.function(signals, *arguments)
        with without_autocast(device):
            return self.function(signals, *arguments)

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        """Return the reason why this kernel cannot run `request`, or `None` if it can."""
        if self.triton and not environment.HAS_TRITON:
            return "Triton is not installed"
        interpreted = self.needs_interpreter(request) and environment.uses_triton_interpreter()
        if self.devices and request.device not in self.devices and not interpreted:
            return f"it runs on {' and '.join(self.devices)}, not on {request.device}"
        if self.unsupported_gpu is not None and request.device == "cuda":
            reason = self.unsupported_gpu(request.device_index)
            if reason is not None:
                return reason
        if request.dtype not in self.dtypes:
            return f"it supports {', '.join(map(_dtype_name, self.dtypes))}, not {_dtype_name(request.dtype)}"
        if request.key_width < self.min_key_width:
            return f"the key width is {request.key_width}; it supports at least {self.min_key_width}"
        if self.max_key_width is not None and request.key_width > self.max_key_width:
            return f"the key width is {request.key_width}; it supports at most {self.max_key_width}"
        narrow = self.narrow_key_width
        if narrow is not None and request.key_width > narrow and request.device == "cuda":
            available = gpu.gpu_shared_memory(request.device_index)
            if available < self.wide_key_memory:
                reason = (
                    f"with {available // 1024} KiB of shared memory per program, this GPU supports at most {narrow}"
                )
                return f"the key width is {request.key_width}; {reason}"
        limit = self.max_single_precision_key_width if request.dtype != torch.bfloat16 else None
        if limit is not None and request.key_width > limit:
            return f"the key width is {request.key_width}; it supports at most {limit} except in bfloat16"
        missing = sorted(request.required_features - self.features)
        return f"it does not support {' or '.join(missing)}" if missing else None

    def is_preferred(self, request: KernelRequest) -> bool:
        """Return whether dispatch prefers this kernel to the rows after it.

        Under `torch.compile` two tokens suffice, so that one graph serves all lengths.
        """
        min_tokens = min(self.min_tokens, 2) if torch.compiler.is_compiling() else self.min_tokens
        return min_tokens <= request.tokens and self.preferred_min_key_width <= request.key_width

    def needs_interpreter(self, request: KernelRequest) -> bool:
        """Return whether only Triton's interpreter could run `request`; dispatch runs it on explicit request alone."""
        return self.triton and self.interpreted and request.device == "cpu"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
