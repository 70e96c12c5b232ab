"""Tile, chunk and block sizes of the Triton kernels of `dense`. They are also needed where Triton is not installed."""

TILE = 16  # tokens per update of the covariance; with more, float32 does not keep it positive definite
CHUNK = 64  # tokens between two covariances that are stored for the backward pass
MIN_SPLIT_TOKENS = 1024  # minimum sequence length that is split in time, so that sequential kernels overlap with others
# Numbers of sequential programs for which splitting is faster: fewer are not the bottleneck, more fill the GPU.
SPLIT_PROGRAM_COUNTS = range(16, 128)
NUM_TIME_SPLITS = 2  # parts into which a sequence is split
MAX_PROGRAM_WIDTH = 128  # largest number of rows of a covariance that one program holds in registers
PROGRAM_NUMBERS = 16384  # numbers of a wider covariance that one program holds in registers: a block of rows
PREFETCH = 16  # tokens whose signals are prefetched together


def may_split_time(batch: int, length: int, heads: int, packed: bool) -> bool:
    """Return whether sequences are long and few enough, but not too few, to be split in time."""
    return not packed and length >= MIN_SPLIT_TOKENS and batch * heads in SPLIT_PROGRAM_COUNTS
