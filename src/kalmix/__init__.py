"""kalmix: sequence layers that are exact or honest Bayesian filters.

Five nouns: a `Design` is what is assumed, signals are what a token supplies, a belief is what is known, an op is
one recurrence algebra, a kernel is one way to compute it. One law: filtering is a monoid action, so filtering
`xs ++ ys` is filtering `xs`, then `ys` from the belief that leaves.
"""

from kalmix import designs, ops
from kalmix._oracle import oracle
from kalmix.beliefs import DenseBelief, DiagonalBelief, HistoryBelief, PointBelief, RidgeBelief
from kalmix.designs import Design
from kalmix.errors import ArgumentError, DesignError, KernelError
from kalmix.filtering import filter
from kalmix.segments import Segments
from kalmix.types import Belief, Filtered
from kalmix.validation import checks

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "Belief",
    "DenseBelief",
    "Design",
    "DesignError",
    "DiagonalBelief",
    "Filtered",
    "HistoryBelief",
    "KernelError",
    "PointBelief",
    "RidgeBelief",
    "Segments",
    "checks",
    "designs",
    "filter",
    "ops",
    "oracle",
]
