"""The kernels of the op `dense`, best first.

Each module exports the same function, and none imports another:

    dense(q, k, v, obs_noise, process_noise, log_decay, angle, belief, segments, variance) -> Filtered

Arguments are checked by the op before they arrive. `belief` is always there; its tensors may be expanded.
"""

from kalmix.ops._dense import chunked, reference
from kalmix.ops._dense import custom_op as fused
from kalmix.ops._shared.kernel import TRANSFORMS, Kernel
from kalmix.validation import SINGLES

_ROTATIONS = frozenset({"rotations"})

KERNELS = (
    Kernel(
        "triton",
        fused.dense,
        devices=("cuda",),
        dtypes=SINGLES,
        max_key_width=256,
        wide_from=8,  # what 16 tokens see of fewer keys has a covariance that float32 cannot factor at the least noise
        triton=True,
        rounds_products=True,  # those of the mean
    ),
    Kernel("chunked", chunked.dense, pays_from=32, serves=_ROTATIONS),
    Kernel("reference", reference.dense, serves=_ROTATIONS | {TRANSFORMS}),
)
