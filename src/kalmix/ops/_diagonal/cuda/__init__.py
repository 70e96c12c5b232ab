"""Kernels of `diagonal` in CUDA C++ that step through the tokens of a tile, for Hopper GPUs.

The Triton kernels wait for loads, and spend many instructions on addresses and on sums over lanes. In CUDA a block
loads tokens into shared memory one chunk ahead, and lanes hold slots in an order that makes sums cheap.
"""

from pathlib import Path

from kalmix.ops._shared.cuda import CudaKernel, kernel_of_file

FOLDER = Path(__file__).parent


def cuda_kernel(name: str) -> CudaKernel:
    """Return the kernel in `name`.cu."""
    return kernel_of_file(FOLDER / f"{name}.cu")
