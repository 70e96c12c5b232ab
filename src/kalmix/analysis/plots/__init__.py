"""Pictures: each function takes arrays and a path, draws, and returns the path."""

from kalmix_bench.experiments.collision.figures import Sweep, mechanism, sweeps
from kalmix_bench.experiments.recall.figures import HeatMap, Lines, benchmark_lines, heat_maps
from kalmix_bench.experiments.sde.figures import Clouds, Path2D, clouds, paths, ratios
from kalmix_bench.experiments.solvers.figures import Panel, panels

from kalmix.analysis.plots.attention import attention_maps, channel_maps
from kalmix.analysis.plots.beliefs import beliefs, posterior_variance
from kalmix.analysis.plots.curves import loss_curve

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
