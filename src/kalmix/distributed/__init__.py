"""Context parallelism: ranks divide the tokens of each sequence among themselves. Sharding plans come here, too."""

from kalmix.distributed.context import ContextParallel as ContextParallel
