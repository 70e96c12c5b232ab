"""Learning to predict linear stochastic differential equations: train, compare with who knows them, one line a cell."""

from kalmix_bench.experiments.sde.protocol import PRESETS, REFERENCES, Cell, Protocol
from kalmix_bench.experiments.sde.results import Results, learned, run
from kalmix_bench.experiments.sde.trainer import Learned, learn

__all__ = ["PRESETS", "REFERENCES", "Cell", "Learned", "Protocol", "Results", "learn", "learned", "run"]
