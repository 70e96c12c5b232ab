"""Predicting linear stochastic differential equations (section 4.3 of Adaptive Filter Attention).

`models`, `trainer` and `protocol`: what learns, and how. `independence` and `calibration`: how far Adaptive Filter
Attention is from the optimum with nothing learned, and what its variance is worth.
"""

from kalmix_bench.experiments.sde.protocol import PRESETS, REFERENCES, SdeCell, SdeProtocol
from kalmix_bench.experiments.sde.trainer import TrainedPredictor, train_predictor

__all__ = ["PRESETS", "REFERENCES", "SdeCell", "SdeProtocol", "TrainedPredictor", "train_predictor"]
