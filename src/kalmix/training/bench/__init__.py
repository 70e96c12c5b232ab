"""The benchmarks of the papers with every layer of the library: models, protocols, and one line a finished cell."""

from kalmix.training.bench.layers import LAYERS
from kalmix.training.bench.models import Shape
from kalmix.training.bench.protocol import Cell, Part, Protocol
from kalmix.training.bench.run import run

__all__ = ["LAYERS", "Cell", "Part", "Protocol", "Shape", "run"]
