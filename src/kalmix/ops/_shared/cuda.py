"""Compilation and launch of kernels in CUDA C++, for Hopper GPUs.

The NVRTC library that torch includes compiles the code at first use. A folder holds the kernels of an op, one per file,
and their headers.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kalmix.ops._shared.gpu import constant_in_graphs

HOPPER = (9, 0)
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

Options = tuple[tuple[str, int], ...]


@constant_in_graphs
def unsupported_gpu(index: int | None) -> str | None:
    """Return why GPU `index` (the current one if `None`) cannot run these kernels, or `None` if it can."""
    return _unsupported(torch.cuda.current_device() if index is None else index)


@cache
def _unsupported(index: int) -> str | None:
    if torch.version.cuda is None:
        return "it requires a PyTorch that is built with CUDA"
    capability = torch.cuda.get_device_capability(index)
    if capability != HOPPER:
        required, actual = ("{}.{}".format(*version) for version in (HOPPER, capability))
        return f"it requires a GPU of compute capability {required} (Hopper); this GPU has {actual}"
    return None if nvrtc_library() is not None else "PyTorch's NVRTC (libcaffe2_nvrtc.so) cannot be loaded"


class CudaKernel:
    """Kernel in CUDA C++, launched like a Triton kernel: `kernel[grid](*arguments, **options)`.

    It runs on the current device and stream. Arguments are tensors and integers (int64 in the kernel); options are
    compile-time constants.

    Raises:
        RuntimeError: the code does not compile, or the driver rejects it.
    """

    def __init__(self, source: Path) -> None:
        self.source, self.name = source, source.stem

    def warmup(self, *arguments: Tensor | int, grid: tuple[int, ...], **options: int) -> None:
        """Start compilation in the background."""
        _compile_async(self.source, tuple(options.items()))

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        return partial(self._run, grid)

    def _run(self, grid: tuple[int, int], *arguments: Tensor | int, **options: int) -> None:
        kernel, threads, shared = _load_kernel(self.source, tuple(options.items()), torch.cuda.current_device())
        values = [ctypes.c_int64(x.data_ptr() if isinstance(x, Tensor) else x) for x in arguments]
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _check(nvrtc_library().cuLaunchKernel(kernel, *grid, 1, threads, 1, 1, shared, stream, addresses, None))


kernel_of_file = cache(CudaKernel)


@cache
def nvrtc_library() -> Any:
    """Return NVRTC and the CUDA driver, through a library of torch; `None` if it cannot be loaded."""
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"))
    except OSError:
        return None


def compile_source(nvrtc: Any, source: Path, options: Options, architecture: str) -> bytes:
    """Compile a kernel to machine code, with options as macros.

    Raises:
        RuntimeError: the code does not compile; the message is the compiler's log.
    """
    headers = _headers(source)
    defines = (f"-D{key}={int(value)}" for key, value in options)
    # NVRTC takes generic lambdas for functions of the host, unless the device is the default.
    flags = [f"--gpu-architecture={architecture}", "--std=c++17", "--device-as-default-execution-space", *defines]
    program = ctypes.c_void_p()
    strings = ctypes.c_char_p * len(headers)
    texts, names = strings(*(x.read_bytes() for x in headers)), strings(*(x.name.encode() for x in headers))
    code, name = source.read_bytes(), source.name.encode()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), code, name, len(headers), texts, names)
    failed = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*map(str.encode, flags)))
    if failed:
        raise RuntimeError(_read_bytes(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode())
    code = _read_bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code


def load_machine_code(nvrtc: Any, source: Path, options: Options, architecture: str) -> bytes:
    """Return the machine code of a kernel, from Triton's cache folder if it was compiled before."""
    from triton.runtime.cache import get_cache_manager

    sources = [file.read_text() for file in (source, *_headers(source))]
    inputs = repr((sources, options, architecture, torch.__version__, torch.version.cuda))
    folder, file = get_cache_manager(hashlib.sha256(inputs.encode()).hexdigest()), f"{source.stem}.cubin"
    path = folder.get_file(file)
    if path is not None:
        return Path(path).read_bytes()
    code = compile_source(nvrtc, source, options, architecture)
    folder.put(code, file)
    return code


def _headers(source: Path) -> list[Path]:
    """Return the headers in the folder of a kernel."""
    return sorted(source.parent.glob("*.cuh"))


def _read_bytes(get_size: Any, write: Any, program: ctypes.c_void_p) -> bytes:
    """Return a byte string from a pair of NVRTC functions that return its size and its contents."""
    size = ctypes.c_size_t()
    get_size(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    write(program, text)
    return text.raw


@cache
def _compile_async(source: Path, options: Options) -> Future[bytes]:
    """Run `load_machine_code` in a thread."""
    architecture = "sm_{}{}a".format(*HOPPER)  # sm_90a: Hopper with wgmma
    return ThreadPoolExecutor(1, source.stem).submit(load_machine_code, nvrtc_library(), source, options, architecture)


@cache
def _load_kernel(source: Path, options: Options, device: int) -> tuple[ctypes.c_void_p, int, int]:
    """Return the kernel on the current device `device`, its number of threads and its bytes of shared memory.

    It is loaded in the thread that launches it: compute-sanitizer hung while another thread loaded a module.
    """
    driver, module, kernel, address = nvrtc_library(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
    code = _compile_async(source, options).result()
    torch.cuda.current_stream().query()  # makes torch's context current for the driver
    _check(driver.cuModuleLoadData(ctypes.byref(module), code))
    _check(driver.cuModuleGetFunction(ctypes.byref(kernel), module, source.stem.encode()))
    requirements = (ctypes.c_int * 2)()
    _check(driver.cuModuleGetGlobal_v2(ctypes.byref(address), None, module, b"REQUIREMENTS"))
    _check(driver.cuMemcpyDtoH_v2(requirements, address, ctypes.sizeof(requirements)))
    threads, shared = requirements
    _check(driver.cuFuncSetAttribute(kernel, _MAX_DYNAMIC_SHARED, shared))
    return kernel, threads, shared


def _check(status: int) -> None:
    """Raise `RuntimeError` if a driver call failed."""
    if status:
        raise RuntimeError(f"the CUDA driver rejected a kernel with error {status}")
