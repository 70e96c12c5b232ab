"""Ops: the recurrence algebras, each one function with one contract (`Filtered` out, belief in and out)."""

from collections.abc import Callable
from typing import NamedTuple

from kalmix.kernels import additive as _additive_kernels
from kalmix.kernels import attend as _attend_kernels
from kalmix.kernels import delta as _delta_kernels
from kalmix.kernels import dense as _dense_kernels
from kalmix.kernels import diagonal as _diagonal_kernels
from kalmix.kernels import ridge as _ridge_kernels
from kalmix.kernels.attend.dynamics import Dynamics
from kalmix.kernels.kernel import Kernel
from kalmix.ops._additive import additive
from kalmix.ops._attend import attend
from kalmix.ops._attend_channels import attend_channels
from kalmix.ops._attend_corotating import attend_corotating
from kalmix.ops._attend_radial import attend_radial
from kalmix.ops._attend_separable import SeparablePrecision, attend_separable
from kalmix.ops._delta import delta
from kalmix.ops._dense import dense
from kalmix.ops._diagonal import diagonal
from kalmix.ops._diagonal_forms import KalmanMatrix, diagonal_fft, diagonal_matrix
from kalmix.ops._ridge import ridge
from kalmix.solvers import Adaptive, Chebyshev, ConjugateGradient, Exact, Fixed, Sketch
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
    "OPS",
    "Adaptive",
    "Chebyshev",
    "ConjugateGradient",
    "Dynamics",
    "Exact",
    "Fixed",
    "KalmanMatrix",
    "Op",
    "SeparablePrecision",
    "Sketch",
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
    "ridge",
]
