"""Several GPUs: context parallelism, and sharding of parameters."""

from kalmix.distributed.context import ContextParallel as ContextParallel
from kalmix.distributed.sharding import shard_dynamics as shard_dynamics
