"""The kernels of the op `ridge`, best first.

Each module exports the same function, and none imports another:

    ridge(q, k, v, log_decay, gain, mix, ridge, solver, belief, segments, variance) -> Filtered

Arguments are checked by the op before they arrive. `belief` is always there; its tensors may be expanded.
"""

from kalmix.kernels.kernel import Kernel
from kalmix.kernels.ridge import chunked, reference

UNROLLED = "unrolled gradients"

KERNELS = (
    Kernel("chunked", chunked.ridge, pays_from=8),
    Kernel("reference", reference.ridge, serves=frozenset({UNROLLED})),
)
