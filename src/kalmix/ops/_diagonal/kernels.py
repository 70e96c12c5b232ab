"""Kernels of the op `diagonal`, best first.

Each module exports the same function, and none imports another:

    diagonal(signals, belief, segments, variance) -> Filtered

The function in `custom_op` also takes `no_prior` (whether no belief was given) and `cuda`.
The op checks arguments and replaces a missing belief by the default, whose tensors may be expanded.
"""

from functools import partial

from kalmix.ops._diagonal import chunked, custom_op, reference
from kalmix.ops._shared.cuda import unsupported_gpu
from kalmix.ops._shared.kernel import TRANSFORMS, Kernel
from kalmix.validation import FLOAT32_STATE_DTYPES

KERNELS = (
    Kernel(
        "cuda",  # "triton" with the kernels of the tokens inside tiles in CUDA C++
        partial(custom_op.diagonal, cuda=True),
        devices=("cuda",),
        dtypes=FLOAT32_STATE_DTYPES,
        min_key_width=9,
        max_key_width=128,
        triton=True,
        unsupported_gpu=unsupported_gpu,
        interpreted=False,
    ),
    Kernel(
        "triton", custom_op.diagonal, devices=("cuda",), dtypes=FLOAT32_STATE_DTYPES, max_key_width=128, triton=True
    ),
    Kernel("chunked", chunked.diagonal, min_tokens=16),
    Kernel(
        "reference", reference.diagonal, features=frozenset({TRANSFORMS, "dynamics that differ from token to token"})
    ),
)
