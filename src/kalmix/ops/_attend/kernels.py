"""The kernels of the op `attend`, best first.

Each module exports the same function, and none imports another:

    attend(signals, belief, segments, variance) -> Filtered

Arguments are checked by the op before they arrive. `belief` is always there; its tensors may be expanded.
"""

from kalmix.ops._attend import chunked, custom_op, reference
from kalmix.ops._shared.kernel import TRANSFORMS, Kernel
from kalmix.validation import SINGLES

KERNELS = (
    Kernel(
        "triton",
        custom_op.attend,
        devices=("cuda",),
        dtypes=SINGLES,
        pays_from=16,
        max_key_width=256,
        max_single_width=128,
        triton=True,
        rounds_products=True,
    ),
    Kernel("chunked", chunked.attend, pays_from=16),
    Kernel("reference", reference.attend, serves=frozenset({TRANSFORMS})),
)
