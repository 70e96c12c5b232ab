"""MAD's compression: random tokens and a last one, from whose output alone a decoder writes all of them down again.

Every token is scored, the last one (always the same) too. Noise, where there is any, is put over tokens and asked for
like them.
"""

from __future__ import annotations

import numpy as np

from kalmix.validation import require
from kalmix_bench.datasets.mad.settings import MadSettings, RowGenerator, make_task
from kalmix_bench.datasets.task import Integers


def row_generator(settings: MadSettings, seed: int) -> RowGenerator:
    """Rows of T tokens, targets being the inputs."""
    s = settings
    s.check_noise_vocabulary()
    last = s.vocab_size - 1
    free = last - s.noise_vocab_size
    require(free >= 1, "vocab_size", s.vocab_size, f"at least {s.vocab_size - free + 1}, for a token to compress")
    rng = np.random.default_rng(seed)

    def draw(training: bool) -> tuple[Integers, Integers]:
        inputs = np.append(rng.integers(free, size=s.seq_len - 1), last)
        if s.frac_noise > 0:
            for position in range(s.seq_len - 1):
                if rng.random() < s.frac_noise:
                    inputs[position] = rng.integers(free, last)
        return inputs, inputs

    return RowGenerator(s.seq_len, draw)


COMPRESSION = make_task(
    "compression",
    "compression",
    row_generator,
    MadSettings(vocab_size=16, seq_len=32),
    sweeps={"vocab_size": (32, 64, 128), "seq_len": (64, 128, 256), "train": (6400, 3200, 1600, 800)},
    from_last=True,
)
