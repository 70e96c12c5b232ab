"""Several GPUs: context parallelism, and sharding of parameters."""

from kalmix.distributed.context import ContextParallel as ContextParallel
from kalmix.distributed.sharding import shard_dynamics as shard_dynamics
from kalmix.distributed.tensor_parallel import gather_heads as gather_heads
from kalmix.distributed.tensor_parallel import shard_heads as shard_heads
