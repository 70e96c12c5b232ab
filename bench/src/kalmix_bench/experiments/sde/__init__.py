"""Prediction of linear stochastic differential equations (section 4.3 of Adaptive Filter Attention).

`models`, `trainer` and `protocol` define the learned predictors. `independence` and `calibration` compare Adaptive
Filter Attention without learning with the optimum, and test its variance.
"""

from kalmix_bench.experiments.sde.protocol import PRESETS, REFERENCES, SdeCell, SdeProtocol
from kalmix_bench.experiments.sde.trainer import TrainedPredictor, train_predictor

__all__ = ["PRESETS", "REFERENCES", "SdeCell", "SdeProtocol", "TrainedPredictor", "train_predictor"]
