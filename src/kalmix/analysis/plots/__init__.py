"""Pictures: each function takes arrays and a path, draws, and returns the path."""

from kalmix.analysis.plots.attention import attention_maps, channel_maps
from kalmix.analysis.plots.beliefs import beliefs, posterior_variance
from kalmix.analysis.plots.curves import loss_curve

__all__ = ["attention_maps", "beliefs", "channel_maps", "loss_curve", "posterior_variance"]
