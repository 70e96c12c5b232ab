"""Op descriptions (`OpSpec`) and the table of all registered ops (`OPS`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kalmix.designs.spec import Algebra, register_algebra
from kalmix.ops._shared.kernel import Kernel
from kalmix.ops._shared.lowering import LowerFn
from kalmix.ops._shared.recursion import Recursion
from kalmix.types import Filtered


@dataclass(frozen=True)
class OpSpec:
    """Description of an op: all that filters, laws, `kalmix doctor` and the fuzz script use.

    Attributes:
        algebra: the op's name and the designs that it filters.
        function: the public function.
        kernels: its implementations, best first.
        belief: class of its belief.
        lower: function that computes its signals from those of a design.
        recursion: its definition, which `kalmix.oracle` evaluates.
        least_noise: smallest observation variance for which float32 results stay within their tolerances, as the
            function's docstring states. The laws and the fuzz script draw noises from this value to 100.

    Example:
        >>> from kalmix.ops import OPS
        >>> spec = OPS["dense"]
        >>> spec.name, spec.belief.__name__, spec.has_variance, [kernel.name for kernel in spec.kernels]
        ('dense', 'DenseBelief', True, ['cuda', 'triton', 'chunked', 'reference'])
    """

    algebra: Algebra
    function: Callable[..., Filtered]
    kernels: tuple[Kernel, ...]
    belief: type
    lower: LowerFn
    recursion: Recursion
    least_noise: float

    @property
    def name(self) -> str:
        """Name of the op, such as "delta"."""
        return self.algebra.op

    @property
    def folder(self) -> str:
        """Import path of the op's package."""
        return self.function.__module__.rpartition(".")[0]

    @property
    def has_variance(self) -> bool:
        """Whether the op returns a variance of the read-out."""
        return self.algebra.covariance.has_variance


OPS: dict[str, OpSpec] = {}


def register(spec: OpSpec) -> None:
    """Add an op to `OPS`; from then on designs lower to it, and laws, `kalmix doctor` and the fuzz script test it."""
    register_algebra(spec.algebra)
    OPS[spec.name] = spec
