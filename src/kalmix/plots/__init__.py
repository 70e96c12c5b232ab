"""Pictures: each function takes arrays and a path, draws, and returns the path."""

from kalmix.plots.attention import attention_maps, channel_maps
from kalmix.plots.beliefs import beliefs, posterior_variance
from kalmix.plots.benchmarks import HeatMap, Lines, benchmark_lines, heat_maps
from kalmix.plots.collision import Sweep, mechanism, sweeps
from kalmix.plots.curves import loss_curve
from kalmix.plots.sde import Clouds, Path2D, clouds, paths, ratios
from kalmix.plots.solvers import Panel, panels

__all__ = [
    "Clouds",
    "HeatMap",
    "Lines",
    "Panel",
    "Path2D",
    "Sweep",
    "attention_maps",
    "beliefs",
    "benchmark_lines",
    "channel_maps",
    "clouds",
    "heat_maps",
    "loss_curve",
    "mechanism",
    "panels",
    "paths",
    "posterior_variance",
    "ratios",
    "sweeps",
]
