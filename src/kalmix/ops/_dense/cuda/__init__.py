"""Sequential kernels of `dense` in CUDA C++.

The kernels are chains of small products, each of which needs the result of the last. Triton moves results between
register layouts through shared memory; `fragments.cuh` uses one layout for results and inputs, and overlaps tensor
cores with other work. The kernels that process tiles in parallel are Triton's.
"""

from pathlib import Path

from kalmix.ops._shared.cuda import CudaKernel, kernel_of_file

FOLDER = Path(__file__).parent


def cuda_kernel(name: str) -> CudaKernel:
    """Return the kernel in `name`.cu."""
    return kernel_of_file(FOLDER / f"{name}.cu")
