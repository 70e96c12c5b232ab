"""kalmix: sequence layers that are Bayesian filters, for PyTorch.

- A *design* states the model: how the state moves, how tokens observe it, how uncertainty is stored
  (`kalmix.designs`).
- *Signals* are the tensors that each token supplies: query, key, value, decay, noise.
- A *belief* is the state of the filter after some tokens (`kalmix.beliefs`).
- An *op* computes the filter of a family of designs: `kalmix.ops.additive`, `delta`, `diagonal`, `dense`, `ridge`,
  `attend`. A *kernel* is one implementation of an op.
- A *layer* is a `torch.nn.Module` around an op (`kalmix.layers`).

Processing a sequence in pieces, and passing the belief on, gives the same result as processing it at once.

Example:
    >>> from kalmix.layers import KLA
    >>> y, state = KLA(64)(torch.randn(2, 16, 64))
    >>> y.shape
    torch.Size([2, 16, 64])
"""

from kalmix import designs, ops, steps, updates
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
    "steps",
    "updates",
]
