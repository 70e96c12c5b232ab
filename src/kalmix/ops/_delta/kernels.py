"""Kernels of the op `delta`, best first.

Each module exports the same function, and none imports another:

    delta(signals, belief, segments) -> Filtered

The function in `custom_op` also takes `no_prior`: whether no belief was given.
The op checks arguments and replaces a missing belief by the default, whose tensors may be expanded.
"""

from kalmix.ops._delta import chunked, custom_op, reference
from kalmix.ops._linear_memory.custom_op import REQUIREMENTS
from kalmix.ops._shared.kernel import TRANSFORMS, Kernel

KERNELS = (
    Kernel("triton", custom_op.delta, **REQUIREMENTS),
    Kernel("chunked", chunked.delta, min_tokens=16, features=frozenset({"value heads of width 1"})),
    Kernel("reference", reference.delta, features=frozenset({TRANSFORMS, "value heads of width 1"})),
)
