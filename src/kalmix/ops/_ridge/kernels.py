"""Kernels of the op `ridge`, in order of preference.

Each module exports the same function, and none imports another:

    ridge(signals, belief, segments, variance, ridge, solver) -> Filtered

The function in `custom_op` also takes `no_prior`: whether no belief was given.
The op checks arguments before the call. `belief` is never `None`; its tensors may be expanded (stride 0).
"""

from kalmix.ops._ridge import chunked, custom_op, reference
from kalmix.ops._ridge.solvers import Chebyshev, ConjugateGradient, Exact, Sketch, Solver
from kalmix.ops._shared.gpu import unsupported_blackwell
from kalmix.ops._shared.kernel import TRANSFORMS, Kernel
from kalmix.validation import FLOAT32_STATE_DTYPES

UNROLLED = "unrolled gradients"
_SOLVER_FEATURES = {ConjugateGradient: "conjugate gradients", Exact: "exact solutions", Sketch: "sketches"}


def required_features(solver: Solver) -> frozenset[str]:
    """Return the features that `solver` requires and only some kernels support."""
    if isinstance(solver, Chebyshev):
        return frozenset({UNROLLED} if solver.backward == "unrolled" else ())
    return frozenset({_SOLVER_FEATURES[type(solver)]})


KERNELS = (
    Kernel(
        "triton",
        custom_op.ridge,
        devices=("cuda",),
        dtypes=FLOAT32_STATE_DTYPES,
        max_key_width=256,
        max_single_precision_key_width=128,
        unsupported_gpu=unsupported_blackwell,
        narrow_key_width=128,
        wide_key_memory=192 * 1024,  # a matrix [K, K] and a factor
        features=frozenset({_SOLVER_FEATURES[ConjugateGradient]}),
        triton=True,
        low_precision_products=True,
    ),
    Kernel("chunked", chunked.ridge, min_tokens=8, features=frozenset(_SOLVER_FEATURES.values())),
    Kernel("reference", reference.ridge, features=frozenset({TRANSFORMS, UNROLLED, *_SOLVER_FEATURES.values()})),
)
