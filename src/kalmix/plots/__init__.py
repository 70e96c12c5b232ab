"""Pictures: each function takes arrays and a path, draws, and returns the path."""

from kalmix.plots.attention import attention_maps
from kalmix.plots.beliefs import beliefs, posterior_variance
from kalmix.plots.collision import Sweep, mechanism, sweeps
from kalmix.plots.curves import loss_curve
from kalmix.plots.solvers import Panel, panels

__all__ = [
    "Panel",
    "Sweep",
    "attention_maps",
    "beliefs",
    "loss_curve",
    "mechanism",
    "panels",
    "posterior_variance",
    "sweeps",
]
