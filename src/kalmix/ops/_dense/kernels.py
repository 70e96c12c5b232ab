"""Kernels of the op `dense`, in order of preference.

Each module exports the same function, and none imports another:

    dense(signals, belief, segments, variance) -> Filtered

The op checks arguments before the call. `belief` is never `None`; its tensors may be expanded (stride 0).
"""

from functools import partial

from kalmix.ops._dense import chunked, custom_op, reference
from kalmix.ops._shared.cuda import unsupported_gpu
from kalmix.ops._shared.gpu import unsupported_blackwell
from kalmix.ops._shared.kernel import TRANSFORMS, Kernel
from kalmix.validation import FLOAT32_STATE_DTYPES

_ROTATIONS = frozenset({"rotations"})

KERNELS = (
    Kernel(
        "cuda",  # "triton" with the two sequential kernels in CUDA C++
        partial(custom_op.dense, cuda=True),
        devices=("cuda",),
        dtypes=FLOAT32_STATE_DTYPES,
        min_key_width=33,  # padded widths of 64 and 128, the ones compared with float64
        max_key_width=128,
        triton=True,
        unsupported_gpu=unsupported_gpu,
        features=_ROTATIONS,
        interpreted=False,
        low_precision_products=True,
    ),
    Kernel(
        "triton",
        custom_op.dense,
        devices=("cuda",),
        dtypes=FLOAT32_STATE_DTYPES,
        max_key_width=512,
        max_single_precision_key_width=256,
        unsupported_gpu=unsupported_blackwell,
        features=_ROTATIONS,
        preferred_min_key_width=8,  # with narrower keys float32 cannot factor a tile's covariance at the least noise
        triton=True,
        low_precision_products=True,  # products of the mean only
    ),
    Kernel("chunked", chunked.dense, min_tokens=32, features=_ROTATIONS),
    Kernel("reference", reference.dense, features=_ROTATIONS | {TRANSFORMS}),
)
