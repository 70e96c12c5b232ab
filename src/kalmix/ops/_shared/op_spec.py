"""Op descriptions (`OpSpec`) and the table of all registered ops (`OPS`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kalmix.designs.kinds import Algebra
from kalmix.designs.spec import register_algebra
from kalmix.ops._shared.kernel import Kernel
from kalmix.ops._shared.lowering import LowerFn
from kalmix.ops._shared.recursion import Recursion
from kalmix.types import Filtered


@dataclass(frozen=True)
class OpSpec:
    """Immutable description of an op, an entry of the dict `kalmix.ops.OPS`, whose keys are the names of ops.

    `kalmix.filter`, `kalmix.oracle`, `kalmix doctor` and the tests of all ops read it. To use an op, call its function;
    you need no `OpSpec`. The fields are not checked here.

    Attributes:
        algebra: name of the op, and which `kalmix.Design` it computes: kinds of evidence and covariance, decays.
        function: the public function, such as `kalmix.ops.dense`.
        kernels: its implementations. The default is the first that supports the call and is efficient for its sizes.
        belief: class of its belief, such as `kalmix.DenseBelief`.
        lower: function `(k, v, signals)` that converts the signals of a design, a dict of tensors, to the keyword
            arguments of `function`.
        recursion: definition of the op for one token, in float64, by which `kalmix.oracle` computes expected results.
        least_noise: smallest observation variance with which float32 results are tested, as the docstring of `function`
            says. Tests draw variances from this value to 100.
        update: function that computes what tokens do to any belief, such as `kalmix.updates.dense`; `None` if the
            belief stores all tokens.
        update_as_filtered: like `update`, but rounded as `function` rounds; `None` if `update` serves.
        prior: function `(v, sizes)` that returns the default prior in the dtype of beliefs for values `v`, given the
            sizes N, G, K and V by letter; `None` likewise.
        count_spans: function `(v, ranks)` that returns the number of spans into which a rank of a context-parallel
            group should cut its tokens, to filter them at the same time; `None` for 1.
        name: name of the op, such as "dense"; a property.
        has_variance: whether `function` has the argument `variance`; a property.
        folder: import path of the op's package; a property.

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
    update: Callable[..., Any] | None = None
    update_as_filtered: Callable[..., Any] | None = None
    prior: Callable[..., Any] | None = None
    count_spans: Callable[..., int] | None = None

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
