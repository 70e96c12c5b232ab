"""Layers on the papers' synthetic benchmarks: models, protocols, presets, training and report."""

from kalmix_bench.experiments.recall.layers import LAYERS
from kalmix_bench.experiments.recall.model_shape import ModelShape
from kalmix_bench.experiments.recall.protocol import Part, RecallCell, RecallProtocol

__all__ = ["LAYERS", "ModelShape", "Part", "RecallCell", "RecallProtocol"]
