"""Seeds of the random streams of a run that must be independent: its data, its weights, the data it is tested on."""

from __future__ import annotations

from kalmix.validation import require

STREAMS = ("training", "weights", "test")
_BITS = 30  # of a run's seed; the two above them name the stream


def stream_seed(stream: str, seed: int) -> int:
    """Return the seed of one stream of run `seed`; two streams never have the same, whatever their runs.

    PyTorch's generator for CPUs uses the low 32 bits of a seed only, so seeds must differ in these.

    Raises:
        ArgumentError: `seed` is negative, or 2^30 or more.
    """
    require(0 <= seed < 2**_BITS, "seed", seed, f"at least 0 and below 2^{_BITS}")
    return STREAMS.index(stream) << _BITS | seed
