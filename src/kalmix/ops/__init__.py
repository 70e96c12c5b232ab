"""Ops: the recurrence algebras, each one function with one contract (`Filtered` out, belief in and out)."""

from collections.abc import Callable
from typing import NamedTuple

from kalmix.ops._additive import kernels as _additive_kernels
from kalmix.ops._additive.api import additive
from kalmix.ops._attend import kernels as _attend_kernels
from kalmix.ops._attend.api import Weight, attend
from kalmix.ops._attend.dynamics import Dynamics, kappa
from kalmix.ops._attend.radial import attend_radial
from kalmix.ops._delta import kernels as _delta_kernels
from kalmix.ops._delta.api import delta
from kalmix.ops._dense import kernels as _dense_kernels
from kalmix.ops._dense.api import LEAST_NOISE, dense
from kalmix.ops._diagonal import kernels as _diagonal_kernels
from kalmix.ops._diagonal.api import diagonal
from kalmix.ops._diagonal.forms import KalmanMatrix, diagonal_fft, diagonal_matrix
from kalmix.ops._ridge import kernels as _ridge_kernels
from kalmix.ops._ridge.api import ridge
from kalmix.ops._ridge.solvers import Adaptive, Chebyshev, ConjugateGradient, Exact, Fixed, Ridge, Sketch, Solver
from kalmix.ops._shared.kernel import Kernel
from kalmix.ops._shared.step_loop import walk
from kalmix.ops.experimental.attend_channels import attend_channels
from kalmix.ops.experimental.attend_corotating import attend_corotating
from kalmix.ops.experimental.attend_separable import SeparablePrecision, attend_separable
from kalmix.types import Filtered


class Op(NamedTuple):
    """A public op and its kernels, best first."""

    function: Callable[..., Filtered]
    kernels: tuple[Kernel, ...]


OPS = {
    "additive": Op(additive, _additive_kernels.KERNELS),
    "delta": Op(delta, _delta_kernels.KERNELS),
    "diagonal": Op(diagonal, _diagonal_kernels.KERNELS),
    "dense": Op(dense, _dense_kernels.KERNELS),
    "ridge": Op(ridge, _ridge_kernels.KERNELS),
    "attend": Op(attend, _attend_kernels.KERNELS),
}

__all__ = [
    "LEAST_NOISE",
    "OPS",
    "Adaptive",
    "Chebyshev",
    "ConjugateGradient",
    "Dynamics",
    "Exact",
    "Fixed",
    "KalmanMatrix",
    "Op",
    "Ridge",
    "SeparablePrecision",
    "Sketch",
    "Solver",
    "Weight",
    "additive",
    "attend",
    "attend_channels",
    "attend_corotating",
    "attend_radial",
    "attend_separable",
    "delta",
    "dense",
    "diagonal",
    "diagonal_fft",
    "diagonal_matrix",
    "kappa",
    "ridge",
    "walk",
]
