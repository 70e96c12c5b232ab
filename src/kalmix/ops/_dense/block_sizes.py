"""How the Triton kernels of `dense` cut time and lay out covariances, known also where Triton is not."""

TILE = 16  # tokens whose update of the covariance is one product; longer ones lose its positivity in float32
CHUNK = 64  # tokens from one covariance kept for the backward pass to the next
MIN_SPLIT_TOKENS = 1024  # tokens from which on sequences are worked on in stretches of time,
SPLIT_PROGRAM_COUNTS = range(
    16, 128
)  # if so many programs step through time: fewer do not wait for the rest, more leave no room for it
NUM_TIME_SPLITS = 2  # how many
MAX_PROGRAM_WIDTH = 128  # rows of a covariance, at most, that one program has in registers as it steps through time
ROWS = 64  # rows of a wider one that a program has
PREFETCH = 16  # tokens whose signals are called for ahead of time


def padded_width(width: int) -> int:
    """Rows of a covariance in scratch memory: a power of two, 16 at least."""
    return max(16, 1 << (int(width) - 1).bit_length())
