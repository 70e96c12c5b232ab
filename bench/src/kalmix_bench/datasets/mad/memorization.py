"""MAD's memorization: key-value pairs that are the same in all rows, so that only weights can store them.

Ids: keys, values, and a last id at positions where a value is predicted. The seed determines the values of keys. Noise
uses the largest value ids; they are not reserved for it.
"""

from __future__ import annotations

import numpy as np

from kalmix.validation import require
from kalmix_bench.datasets.mad.settings import MadSettings, RowGenerator, make_task
from kalmix_bench.datasets.metrics import IGNORE_INDEX


def row_generator(settings: MadSettings, seed: int) -> RowGenerator:
    """Return a generator of rows of T / 2 keys, each followed by the query id."""
    s = settings
    s.check_noise_vocabulary()
    asks = s.vocab_size - 1
    require(asks >= 2, "vocab_size", s.vocab_size, "at least 3 (a key, a value, a request)")
    require(s.noise_vocab_size <= asks, "noise_vocab_size", s.noise_vocab_size, f"at most {asks} (with {asks + 1} ids)")
    require(s.seq_len >= 2, "seq_len", s.seq_len, "at least 2")
    keys, values = np.arange(asks // 2), np.arange(asks // 2, asks)
    once = np.random.default_rng(seed)
    once.shuffle(keys)
    once.shuffle(values)
    value_of = dict(zip(keys.tolist(), values.tolist(), strict=False))  # with an odd number of ids, one value is unused
    names = list(value_of)
    rng = np.random.default_rng(seed)

    def draw(training: bool) -> tuple[list[int], list[int]]:
        pairs = s.seq_len // 2
        certain = rng.integers(pairs)
        inputs, targets = [], []
        for pair in range(pairs):
            if s.frac_noise > 0 and pair != certain and rng.random() < s.frac_noise:
                inputs += rng.integers(asks - s.noise_vocab_size, asks, size=2).tolist()
                targets += IGNORE_INDEX, IGNORE_INDEX
            else:
                key = names[rng.integers(len(names))]
                inputs += key, asks
                targets += IGNORE_INDEX, value_of[key]
        return inputs, targets

    return RowGenerator(s.seq_len // 2 * 2, draw)


MEMORIZATION = make_task(
    "memorization",
    "memorization",
    row_generator,
    MadSettings(vocab_size=256, seq_len=32),
    sweeps={"vocab_size": (512, 1024, 2048, 4096, 8192)},
    train=256,
)
