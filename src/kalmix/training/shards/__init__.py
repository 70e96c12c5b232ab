"""Token shards: tokenise a corpus once, then read it packed, shuffled and from any position."""

from kalmix._extras import optional_imports

with optional_imports():  # NumPy
    from kalmix.training.shards.dataset_source import DatasetOptions
    from kalmix.training.shards.loader import Order, TokenLoader
    from kalmix.training.shards.manifest import Manifest
    from kalmix.training.shards.preparation import Preparation, prepare
    from kalmix.training.shards.reader import Shards

__all__ = ["DatasetOptions", "Manifest", "Order", "Preparation", "Shards", "TokenLoader", "prepare"]
