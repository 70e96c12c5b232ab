"""Simulated GPUs: calls on tensors elsewhere, in which the rules of the library choose Triton kernels for a named GPU.

Triton's interpreter must be off when this module is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from kalmix.errors import KernelError
from kalmix.layers.fused import dispatch
from kalmix.ops._shared.custom_op import OP_FUNCTIONS
from kalmix.ops._shared.gpu import num_multiprocessors, shared_memory
from kalmix.ops._shared.kernel import Kernel, KernelRequest
from kalmix.ops._shared.triton.compile_and_launch import Launch, dry_run

KIB = 1024


class Gpu(NamedTuple):
    """GPU: compute capability without the dot, multiprocessors, and bytes of shared memory that a program may use."""

    architecture: int
    multiprocessors: int
    shared_memory: int


GPUS = {
    "sm_80": Gpu(80, 108, 163 * KIB),  # A100
    "sm_86": Gpu(86, 84, 99 * KIB),  # A10, RTX 3090
    "sm_89": Gpu(89, 128, 99 * KIB),  # L4, L40S, RTX 4090
    "sm_90": Gpu(90, 132, 227 * KIB),  # H100, H200
    "sm_100": Gpu(100, 148, 227 * KIB),  # B200
    "sm_120": Gpu(120, 170, 99 * KIB),  # RTX 5090
}


class Configuration(NamedTuple):
    """Kernel with its compile-time options for one GPU.

    Attributes:
        part: op or part of a layer.
        gpu: key of `GPUS`.
        kernel: name of the Triton function.
        options: constants and launch options.
        signature: module of the kernel, and types of its arguments.
        call: description of the first call that launches it.
        compile: function that compiles it.
    """

    part: str
    gpu: str
    kernel: str
    options: dict[str, Any]
    signature: tuple[Any, ...]
    call: str
    compile: Callable[[], Any]


class Collector:
    """Collector of the configurations that calls launch on simulated GPUs.

    Two configurations differ in the GPU, the kernel, an option or the type of an argument. Of argument values, such as
    strides, those of the first call are compiled.

    Args:
        gpus: keys of `GPUS`.
        by_value: whether configurations also differ in argument values for which Triton compiles a kernel again, such
            as a size of 1 or an address that is no multiple of 16.

    Attributes:
        found: configurations by Triton's cache key, which includes the sources of the kernel and Triton's version.
        refused: reasons why kernels refuse a GPU, by GPU, part and call.
    """

    def __init__(self, gpus: list[str], by_value: bool = False) -> None:
        self.found: dict[str, Configuration] = {}
        self.refused: dict[tuple[str, str, str], str] = {}
        self._gpus, self._by_value, self._seen, self._label = gpus, by_value, set[Any](), ("", "")
        self._driver = _Driver(gpus)
        self._compilation = triton.AsyncCompileMode(_Deferred())  # pyright: ignore[reportArgumentType]

    def run(self, part: str, call: str, function: Callable[[], object]) -> None:
        """Call `function` once for each GPU.

        It creates tensors on the device "meta" and calls an op or a part. Layers need the device "cpu"; values that
        kernels would write are undefined, so call them inside `kalmix.checks(False)`.
        """
        self._label = part, call
        with self._simulation():
            for device in range(len(self._gpus)):
                self._driver.device = device
                for ask in (num_multiprocessors, shared_memory):
                    ask.cache_clear()
                try:
                    with _Implementations():
                        function()
                except KernelError as error:
                    reason = str(error).partition("does not support this call: ")[2] or str(error)
                    self.refused[self._gpus[device], part, call] = reason.partition("; use")[0]
        for ask in (num_multiprocessors, shared_memory):
            ask.cache_clear()

    def _record(self, launch: Launch) -> None:
        """Add the configuration of a launch on the current GPU."""
        if not hasattr(launch.kernel, "params"):  # a kernel in CUDA C++
            return
        gpu, name = self._gpus[self._driver.device], launch.kernel.__name__
        types = (x.dtype if isinstance(x, Tensor) else type(x) for x in launch.arguments)
        signature = (launch.kernel.module, *types)
        identity = (gpu, name, *sorted(launch.options.items()), *signature)
        if identity in self._seen and not self._by_value:
            return
        self._seen.add(identity)
        arguments = (_Pointer(x) if isinstance(x, Tensor) else x for x in launch.arguments)
        future = launch.kernel.warmup(*arguments, grid=launch.grid, **launch.options).future
        part, call = self._label
        if not self._by_value or future._key not in self.found:
            self.found[future._key] = Configuration(part, gpu, name, launch.options, signature, call, future.function)

    @contextmanager
    def _simulation(self) -> Iterator[None]:
        supports = Kernel.unsupported_reason

        def supports_on_gpu(kernel: Kernel, request: KernelRequest) -> str | None:
            return supports(kernel, replace(request, device="cuda"))

        def properties(device: Any = None) -> SimpleNamespace:
            gpu = GPUS[self._gpus[self._driver.device]]
            return SimpleNamespace(
                multi_processor_count=gpu.multiprocessors, shared_memory_per_block_optin=gpu.shared_memory
            )

        def device_capability(device: Any = None) -> tuple[int, int]:
            return divmod(GPUS[self._gpus[self._driver.device]].architecture, 10)

        with ExitStack() as stack:
            for name, value in (
                ("torch.cuda.is_available", lambda: True),
                ("torch.cuda.device_of", lambda x: nullcontext()),
                ("torch.cuda.current_device", lambda: self._driver.device),
                ("torch.cuda.get_device_properties", properties),
                ("torch.cuda.get_device_capability", device_capability),
                ("torch.version.cuda", "13.0"),
                ("kalmix.ops._shared.kernel.Kernel.unsupported_reason", supports_on_gpu),
                ("kalmix.ops._shared.kernel.Kernel.needs_interpreter", lambda kernel, request: False),
                ("kalmix.layers.fused.dispatch.DEVICES", (*dispatch.DEVICES, "meta", "cpu")),
                ("triton.runtime._async_compile.active_mode", SimpleNamespace(get=lambda: self._compilation)),
            ):
                stack.enter_context(patch(name, value))
            stack.callback(setattr, driver, "_active", driver._active)
            driver.set_active(self._driver)  # pyright: ignore[reportArgumentType]
            stack.enter_context(dry_run(self._record))
            yield


class _Driver:
    """Triton driver without a GPU; device i is the i-th simulated GPU."""

    def __init__(self, gpus: list[str]) -> None:
        self.device, self._gpus = 0, gpus

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", GPUS[self._gpus[self.device]].architecture, 32)


class _Deferred:
    """Executor that returns functions instead of calling them."""

    def submit(self, function: Callable[[], Any]) -> Any:
        return SimpleNamespace(function=function)


class _Pointer:
    """Kernel argument in place of a tensor, with the alignment that its address would have on a GPU."""

    def __init__(self, x: Tensor) -> None:
        self.dtype, self._offset = x.dtype, x.storage_offset() * x.element_size()

    def data_ptr(self) -> int:
        return self._offset

    def ptr_range(self) -> int:
        return 1 << 40


class _Implementations(TorchDispatchMode):
    """Mode in which custom ops run their implementation on meta tensors too, instead of returning empty tensors."""

    def __torch_dispatch__(self, op: Any, types: Any, inputs: Any = (), keywords: Any = None) -> Any:
        if op not in OP_FUNCTIONS:
            return op(*inputs, **(keywords or {}))
        with self:
            return OP_FUNCTIONS[op](*inputs, **(keywords or {}))
