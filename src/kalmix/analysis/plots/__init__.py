"""Figures: each function draws arrays and writes a file. They need the extra `plots`: pip install 'kalmix[plots]'."""

from kalmix._extras import optional_imports

with optional_imports():
    from kalmix.analysis.plots.attention import attention_maps, channel_maps
    from kalmix.analysis.plots.beliefs import beliefs, posterior_variance
    from kalmix.analysis.plots.curves import loss_curve

__all__ = ["attention_maps", "beliefs", "channel_maps", "loss_curve", "posterior_variance"]
