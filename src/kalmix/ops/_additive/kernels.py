"""Kernels of the op `additive`, best first.

Each module exports the same function, and none imports another:

    additive(signals, belief, segments) -> Filtered

The function in `custom_op` also takes `no_prior`: whether no belief was given.
The op checks arguments and replaces a missing belief by the default, whose tensors may be expanded.
"""

from kalmix.ops._additive import chunked, custom_op, reference
from kalmix.ops._linear_memory.custom_op import REQUIREMENTS
from kalmix.ops._shared.kernel import TRANSFORMS, Kernel

KERNELS = (
    Kernel("triton", custom_op.additive, **REQUIREMENTS),
    Kernel("chunked", chunked.additive, min_tokens=16),
    Kernel("reference", reference.additive, features=frozenset({TRANSFORMS})),
)
