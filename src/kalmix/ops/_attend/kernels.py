"""Table of the kernels of the op `attend`, in order of preference.

Each kernel is a module with the function

    attend(signals, belief, segments, variance) -> Filtered

and imports no other kernel. The op checks the arguments first. `belief` is never `None`; its tensors may be expanded.
"""

from kalmix.ops._attend import chunked, custom_op, reference
from kalmix.ops._shared.gpu import unsupported_blackwell
from kalmix.ops._shared.kernel import TRANSFORMS, Kernel
from kalmix.validation import FLOAT32_STATE_DTYPES

KERNELS = (
    Kernel(
        "triton",
        custom_op.attend,
        devices=("cuda",),
        dtypes=FLOAT32_STATE_DTYPES,
        min_tokens=16,
        max_key_width=256,
        max_single_precision_key_width=128,
        triton=True,
        unsupported_gpu=unsupported_blackwell,
        low_precision_products=True,
    ),
    Kernel("chunked", chunked.attend, min_tokens=16),
    Kernel("reference", reference.attend, features=frozenset({TRANSFORMS})),
)
