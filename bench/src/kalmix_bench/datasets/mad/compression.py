"""MAD's compression: an encoder reads random tokens and a final token; a decoder rebuilds all from the final output.

Every token is scored, the constant final one included. Noise tokens replace tokens at random and are scored too.
"""

from __future__ import annotations

import numpy as np

from kalmix.validation import require
from kalmix_bench.datasets.mad.settings import MadSettings, RowGenerator, make_task
from kalmix_bench.datasets.task import Integers


def row_generator(settings: MadSettings, seed: int) -> RowGenerator:
    """Return a generator of rows of T tokens whose targets equal the inputs."""
    s = settings
    s.check_noise_vocabulary()
    last = s.vocab_size - 1
    free = last - s.noise_vocab_size
    require(free >= 1, "vocab_size", s.vocab_size, f"at least {s.vocab_size - free + 1} (for a token to compress)")
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
