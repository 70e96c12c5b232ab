"""A kernel as data: one way to compute an op, and what it needs.

Dispatch, the laws, `kalmix doctor` and the benchmarks all read the same rows; adding a row adds them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kalmix.ops._shared import environment as library
from kalmix.types import Filtered
from kalmix.validation import FLOATS

TRANSFORMS = "torch.func transforms and forward-mode derivatives"  # of `Kernel.serves`: plain autograd, of any order


@dataclass(frozen=True)
class Call:
    """What a call asks of a kernel: facts known without looking at values."""

    device: str
    dtype: torch.dtype
    key_width: int
    value_width: int
    tokens: int
    needs: frozenset[str] = frozenset()  # what only some kernels serve, in words
    index: int | None = None  # of the device; the current one if absent


@dataclass(frozen=True)
class Kernel:
    """One row of an op's `KERNELS` table.

    Attributes:
        name: "reference", "chunked", "triton", "cuda".
        function: the kernel itself; a Triton row imports Triton when it runs, not before.
        devices: device types it serves; empty for all.
        dtypes: dtypes of q, k, v it serves.
        pays_from: how many tokens it takes to be worth more than the rows after it.
        wide_from: narrowest keys for which it is preferred to the rows after it.
        min_key_width: the narrowest key it serves.
        max_key_width: the widest key it serves; `None` for any.
        max_single_width: the widest it serves computing in single precision, which all dtypes but bfloat16 ask for.
        serves: what it serves of that which only some kernels do (`Call.needs`). A kernel that serves `TRANSFORMS` has
            derivatives of every order, forward and backward; the others have first derivatives, backward.
        triton: whether it needs Triton.
        unsupported_gpu: function of a GPU's index (the current GPU's if `None`) that returns why this GPU cannot run
            it, or `None` if it can. A kernel that asks is never interpreted. It must be traceable by torch.compile.
        rounds_products: whether products of half-precision signals are rounded to their dtype again on the way, as
            tensor cores take them; its budget then is that dtype's, not float32's.
    """

    name: str
    function: Callable[..., Filtered]
    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = FLOATS
    pays_from: int = 1
    wide_from: int = 1
    min_key_width: int = 1
    max_key_width: int | None = None
    max_single_width: int | None = None
    serves: frozenset[str] = frozenset()
    triton: bool = False
    unsupported_gpu: Callable[[int | None], str | None] | None = None
    rounds_products: bool = False

    def __call__(self, signals: tuple[Any, ...], *arguments: Any) -> Filtered:
        """Run it in the dtypes given: a filter stays out of autocast, which would round its beliefs.

        Args:
            signals: the tensors of the op's tokens, q first.
            arguments: the belief, the segments, and what else the kernels of the op take.
        """
        device = signals[0].device.type
        if device == "meta":  # which autocast does not know
            return self.function(signals, *arguments)
        with torch.autocast(device, enabled=False):
            return self.function(signals, *arguments)

    def refuses(self, call: Call) -> str | None:
        """Why this kernel cannot serve `call`, or `None` if it can."""
        if self.triton and not library.HAS_TRITON:
            return "Triton is not installed"
        interpreted = self.interpretable(call) and library.triton_interprets()
        if self.devices and call.device not in self.devices and not interpreted:
            return f"it runs on {' and '.join(self.devices)}, not on {call.device}"
        reason = self.unsupported_gpu(call.index) if self.unsupported_gpu is not None else None
        if reason is not None:
            return reason
        if call.dtype not in self.dtypes:
            return f"it takes {', '.join(str(d).removeprefix('torch.') for d in self.dtypes)}, not {call.dtype}"
        if call.key_width < self.min_key_width:
            return f"keys are {call.key_width} wide, it takes at least {self.min_key_width}"
        if self.max_key_width is not None and call.key_width > self.max_key_width:
            return f"keys are {call.key_width} wide, it takes at most {self.max_key_width}"
        single = self.max_single_width if call.dtype != torch.bfloat16 else None
        if single is not None and call.key_width > single:
            return f"keys are {call.key_width} wide, it takes at most {single} but in bfloat16"
        beyond = sorted(call.needs - self.serves)
        return f"it does not serve {' or '.join(beyond)}" if beyond else None

    def pays(self, call: Call) -> bool:
        """Return whether it is preferred to the rows after it."""
        return self.pays_from <= call.tokens and self.wide_from <= call.key_width

    def interpretable(self, call: Call) -> bool:
        """Whether only Triton's interpreter could serve `call`: a debugger, so never chosen unasked."""
        return self.triton and self.unsupported_gpu is None and call.device == "cpu"
