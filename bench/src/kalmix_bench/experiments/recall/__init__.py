"""The benchmarks of the papers with every layer of the library: models, protocols, and one line a finished cell."""

from kalmix_bench.experiments.recall.layers import LAYERS
from kalmix_bench.experiments.recall.models import Shape
from kalmix_bench.experiments.recall.protocol import Cell, Part, Protocol
from kalmix_bench.experiments.recall.run import run

__all__ = ["LAYERS", "Cell", "Part", "Protocol", "Shape", "run"]
