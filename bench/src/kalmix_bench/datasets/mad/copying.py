"""MAD's selective copying: tokens between blanks, to be copied in order after a request token.

Ids: tokens to copy, then a blank, then the request. The original code draws the positions of blanks from numpy's global
generator, seeded with the same number; this module uses a generator of its own. Blanks are inserted before tokens, so
the last token to copy is followed by the request.
"""

from __future__ import annotations

import numpy as np

from kalmix.validation import require
from kalmix_bench.datasets.mad.settings import MadSettings, RowGenerator, make_task
from kalmix_bench.datasets.metrics import IGNORE_INDEX
from kalmix_bench.datasets.task import Integers


def row_generator(settings: MadSettings, seed: int) -> RowGenerator:
    """Return a generator of rows of T tokens: c tokens to copy, which are the targets of the last c tokens (blanks)."""
    length, c = settings.seq_len, settings.num_tokens_to_copy
    blank, asks = settings.vocab_size - 2, settings.vocab_size - 1
    require(settings.vocab_size >= 3, "vocab_size", settings.vocab_size, "at least 3 (to copy, blank, request)")
    require(c >= 1, "num_tokens_to_copy", c, "at least 1")
    require(length > 2 * c + 1, "seq_len", length, f"above {2 * c + 1} (twice the tokens to copy, and a request)")
    tokens, blank_generator = np.random.default_rng(seed), np.random.RandomState(seed)

    def draw(training: bool) -> tuple[Integers, Integers]:
        copied = tokens.integers(blank, size=c)
        before = np.bincount(
            blank_generator.randint(0, c, length - 2 * c - 1), minlength=c
        )  # number of blanks before each token
        inputs, targets = np.full(length, blank), np.full(length, IGNORE_INDEX)
        inputs[np.arange(c) + before.cumsum()] = copied
        inputs[length - c - 1] = asks
        targets[length - c :] = copied
        return inputs, targets

    return RowGenerator(length, draw)


SELECTIVE_COPYING = make_task(
    "selective-copying",
    "selective-copying",
    row_generator,
    MadSettings(vocab_size=16, seq_len=256, num_tokens_to_copy=16),
    sweeps={
        "vocab_size": (32, 64, 128),
        "seq_len": (512, 1024),
        "train": (6400, 3200, 1600, 800),
        "num_tokens_to_copy": (32, 64, 96),
    },
)
