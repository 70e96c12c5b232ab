"""The kernels of the op `additive`, best first.

Each module exports the same function, and none imports another:

    additive(q, k, v, log_decay, gain, belief, segments) -> Filtered

Arguments are checked by the op before they arrive. `belief` is always there; its tensors may be expanded.
"""

from kalmix.kernels.additive import chunked, fused, reference
from kalmix.kernels.kernel import TRANSFORMS, Kernel
from kalmix.kernels.primitives.fused_memory import SERVED

KERNELS = (
    Kernel("triton", fused.additive, **SERVED),
    Kernel("chunked", chunked.additive, pays_from=16),
    Kernel("reference", reference.additive, serves=frozenset({TRANSFORMS})),
)
