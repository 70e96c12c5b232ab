"""Learning to predict linear stochastic differential equations: train, compare with who knows them, one line a cell."""

from kalmix.training.sde.protocol import PRESETS, REFERENCES, Cell, Protocol
from kalmix.training.sde.results import Follow, Results, learned, run
from kalmix.training.sde.trainer import Learned, Tell, learn

__all__ = [
    "PRESETS",
    "REFERENCES",
    "Cell",
    "Follow",
    "Learned",
    "Protocol",
    "Results",
    "Tell",
    "learn",
    "learned",
    "run",
]
