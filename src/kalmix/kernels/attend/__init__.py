"""The kernels of the op `attend`, best first.

Each module exports the same function, and none imports another:

    attend(q, k, v, keys, values, weighing, times, belief, segments, variance) -> Filtered

Arguments are checked by the op before they arrive; `keys` and `values` are `Dynamics`, values those of keys if `None`.
`belief` is always there; its tensors may be expanded.
"""

from kalmix.kernels.attend import chunked, reference
from kalmix.kernels.kernel import Kernel

KERNELS = (
    Kernel("chunked", chunked.attend, pays_from=16),
    Kernel("reference", reference.attend),
)
