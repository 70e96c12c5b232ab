"""Layers on the papers' synthetic benchmarks: models, protocols and presets, training and report."""

from kalmix_bench.experiments.recall.layers import LAYERS
from kalmix_bench.experiments.recall.models import Shape
from kalmix_bench.experiments.recall.protocol import Cell, Part, Protocol

__all__ = ["LAYERS", "Cell", "Part", "Protocol", "Shape"]
