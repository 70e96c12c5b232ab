"""Pseudo-random permutation of 0, ..., n - 1 that is computed index by index, without storing it."""

from __future__ import annotations

import hashlib

import numpy as np

_ROUNDS = 6


def permute(index: np.ndarray, size: int, *key: object) -> np.ndarray:
    """Return the images of `index` under the permutation of 0, ..., `size` - 1 that belongs to a key.

    A Feistel network permutes the numbers below a power of 4; images of at least `size` are permuted again until they
    are smaller (cycle walking), on average fewer than 4 times.

    Args:
        index: int64, from 0 to `size` - 1.
        size: number of elements, at least 1.
        key: values that choose the permutation, such as a seed and an epoch.

    Example:
        >>> import numpy as np
        >>> from kalmix.training.shards.permutation import permute
        >>> sorted(permute(np.arange(5), 5, "seed", 0).tolist())
        [0, 1, 2, 3, 4]
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
    keys = np.frombuffer(digest, np.uint64)

    def feistel(x: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & mask
        for each in keys:
            left, right = right, left ^ (_mix(right ^ each) & mask)
        return (left << half) | right

    x = feistel(index.astype(np.uint64))
    while len(outside := np.flatnonzero(x >= size)):
        x[outside] = feistel(x[outside])
    return x.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """Return a hash of each number, uint64 (the finaliser of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
