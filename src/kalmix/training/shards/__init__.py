"""Token shards: tokenise a corpus once, then read it packed, shuffled and from any position."""

from kalmix.training.shards.manifest import Manifest
from kalmix.training.shards.preparation import Preparation, prepare
from kalmix.training.shards.sources import DatasetOptions

__all__ = ["DatasetOptions", "Manifest", "Preparation", "prepare"]
