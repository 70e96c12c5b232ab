"""Tables of the kernels of the ops `attend` and `attend_radial`, in order of preference.

Each kernel is a module with the function

    attend(signals, belief, segments, variance) -> Filtered

and imports no other kernel. The op checks the arguments first. `belief` is never `None`; its tensors may be expanded.
"""

from kalmix.ops._attend import chunked, custom_op, radial_custom_op, radial_kernel, reference
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

RADIAL_KERNELS = (
    Kernel(
        "triton",
        radial_custom_op.attend_radial,
        devices=("cuda",),
        dtypes=FLOAT32_STATE_DTYPES,
        min_tokens=16,
        max_key_width=128,
        max_single_precision_key_width=64,
        triton=True,
        unsupported_gpu=unsupported_blackwell,
        low_precision_products=True,
    ),
    Kernel("reference", radial_kernel.attend_radial, features=frozenset({TRANSFORMS})),
)
