"""Ops: the recurrence algebras, each one function with one contract (`Filtered` out, belief in and out)."""

from collections.abc import Callable
from typing import NamedTuple

from kalmix.kernels import diagonal as _diagonal_kernels
from kalmix.kernels.kernel import Kernel
from kalmix.ops._diagonal import diagonal
from kalmix.ops._diagonal_forms import KalmanMatrix, diagonal_fft, diagonal_matrix
from kalmix.types import Filtered


class Op(NamedTuple):
    """A public op and its kernels, best first."""

    function: Callable[..., Filtered]
    kernels: tuple[Kernel, ...]


OPS = {"diagonal": Op(diagonal, _diagonal_kernels.KERNELS)}

__all__ = ["OPS", "KalmanMatrix", "Op", "diagonal", "diagonal_fft", "diagonal_matrix"]
