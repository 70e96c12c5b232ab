"""Seeds of the independent random streams of a run: training data, weights and test data."""

from __future__ import annotations

from kalmix.validation import require

STREAMS = ("training", "weights", "test")
_BITS = 30  # bits of a run's seed; the two bits above them hold the stream


def stream_seed(stream: str, seed: int) -> int:
    """Return the seed of one random stream of run `seed`. Seeds of different streams differ for all runs.

    PyTorch's CPU generator uses only the low 32 bits of a seed, so seeds must differ in these.

    Raises:
        ArgumentError: `seed` is negative or at least 2^30.
    """
    require(0 <= seed < 2**_BITS, "seed", seed, f"at least 0 and below 2^{_BITS}")
    return STREAMS.index(stream) << _BITS | seed
