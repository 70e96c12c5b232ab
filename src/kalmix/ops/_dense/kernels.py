"""The kernels of the op `dense`, best first.

Each module exports the same function, and none imports another:

    dense(signals, belief, segments, variance) -> Filtered

Arguments are checked by the op before they arrive. `belief` is always there; its tensors may be expanded.
"""

from functools import partial

from kalmix.ops._dense import chunked, custom_op, reference
from kalmix.ops._dense.cuda.compile import unsupported_gpu
from kalmix.ops._shared.kernel import TRANSFORMS, Kernel
from kalmix.validation import FLOAT32_STATE_DTYPES

_ROTATIONS = frozenset({"rotations"})

KERNELS = (
    Kernel(
        "cuda",  # as "triton", but what steps through time is CUDA C++
        partial(custom_op.dense, cuda=True),
        devices=("cuda",),
        dtypes=FLOAT32_STATE_DTYPES,
        min_key_width=33,  # covariances that fill two or four groups of 32 rows: those compared with float64
        max_key_width=128,
        triton=True,
        unsupported_gpu=unsupported_gpu,
        low_precision_products=True,
    ),
    Kernel(
        "triton",
        custom_op.dense,
        devices=("cuda",),
        dtypes=FLOAT32_STATE_DTYPES,
        max_key_width=256,
        preferred_min_key_width=8,  # with narrower keys float32 cannot factor a tile's covariance at the least noise
        triton=True,
        low_precision_products=True,  # those of the mean
    ),
    Kernel("chunked", chunked.dense, min_tokens=32, features=_ROTATIONS),
    Kernel("reference", reference.dense, features=_ROTATIONS | {TRANSFORMS}),
)
