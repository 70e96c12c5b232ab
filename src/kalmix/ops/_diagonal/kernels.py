"""Kernels of the op `diagonal`, best first.

Each module exports the same function, and none imports another:

    diagonal(signals, belief, segments, variance) -> Filtered

The op checks arguments and replaces a missing belief by the default, whose tensors may be expanded.
"""

from kalmix.ops._diagonal import chunked, custom_op, reference
from kalmix.ops._shared.kernel import TRANSFORMS, Kernel
from kalmix.validation import FLOAT32_STATE_DTYPES

KERNELS = (
    Kernel(
        "triton", custom_op.diagonal, devices=("cuda",), dtypes=FLOAT32_STATE_DTYPES, max_key_width=128, triton=True
    ),
    Kernel("chunked", chunked.diagonal, min_tokens=16),
    Kernel(
        "reference", reference.diagonal, features=frozenset({TRANSFORMS, "dynamics that differ from token to token"})
    ),
)
