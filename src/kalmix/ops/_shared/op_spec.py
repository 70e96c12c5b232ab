"""The row of an op, `OpSpec`, and the table of those that folders have registered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kalmix.designs.spec import Algebra, register_algebra
from kalmix.ops._shared.kernel import Kernel
from kalmix.ops._shared.lowering import Lower
from kalmix.ops._shared.recursion import Recursion
from kalmix.types import Filtered


@dataclass(frozen=True)
class OpSpec:
    """Everything that the rest of the library knows of an op.

    Attributes:
        algebra: the designs that it filters, and its name.
        function: the public function.
        kernels: its kernels, best first.
        belief: the type of its belief.
        lower: computes its signals from those of a design.
        recursion: its definition, of which `kalmix.oracle` makes a filter.
        least_noise: least variance of an observation that the function's docstring names: from there on, float32
            results stay within their error budgets. The laws and the fuzz script draw noises from it to 100.
    """

    algebra: Algebra
    function: Callable[..., Filtered]
    kernels: tuple[Kernel, ...]
    belief: type
    lower: Lower
    recursion: Recursion
    least_noise: float

    @property
    def name(self) -> str:
        return self.algebra.op

    @property
    def folder(self) -> str:
        """The package of its public function."""
        return self.function.__module__.rpartition(".")[0]

    @property
    def has_variance(self) -> bool:
        """Whether its read-out has a variance."""
        return self.algebra.covariance.has_variance


OPS: dict[str, OpSpec] = {}


def register(spec: OpSpec) -> None:
    """Add an op: designs lower to it, and laws, `kalmix doctor` and the fuzz script try it."""
    register_algebra(spec.algebra)
    OPS[spec.name] = spec
