"""Learning to predict linear stochastic differential equations: train, compare with who knows them, one line a cell."""

from kalmix.training.sde.protocol import PRESETS, REFERENCES, Cell, Protocol
from kalmix.training.sde.results import Results, learned, run
from kalmix.training.sde.trainer import Learned, learn

__all__ = ["PRESETS", "REFERENCES", "Cell", "Learned", "Protocol", "Results", "learn", "learned", "run"]
