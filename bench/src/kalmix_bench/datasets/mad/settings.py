"""What the six tasks of MAD share: their settings, and one generator that makes all rows of a seed.

Poli et al., Mechanistic Design and Scaling of Hybrid Architectures, 2024 (arXiv:2403.17844); public code
athms/mad-lab, whose rows these are, bit for bit, with its data workers at their default (none).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kalmix.validation import require
from kalmix_bench.datasets.metrics import IGNORE_INDEX, macro, micro
from kalmix_bench.datasets.task import Integers, Published, Rows, Task


@dataclass(frozen=True)
class MadSettings:
    """Settings of MAD, by its names; each task takes all, and leaves aside those that mean nothing to it.

    Attributes:
        vocab_size: V, special tokens and noise included.
        seq_len: T; the recall tasks' rows are a token shorter, since what is asked for is the next token.
        frac_noise: the part of pairs (in compression, of tokens) that are noise.
        noise_vocab_size: how many ids are kept for noise, whether or not there is any.
        num_tokens_to_copy: of selective copying.
        k_motif_size, v_motif_size: the most tokens that a key, a value, of fuzzy recall has.
        multi_query: whether every key that comes again is asked for, and not only the last.
    """

    vocab_size: int = 16
    seq_len: int = 128
    frac_noise: float = 0.0
    noise_vocab_size: int = 0
    num_tokens_to_copy: int = 0
    k_motif_size: int = 1
    v_motif_size: int = 1
    multi_query: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab_size", "seq_len", "k_motif_size", "v_motif_size"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("noise_vocab_size", "num_tokens_to_copy"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        require(0 <= self.frac_noise < 1, "frac_noise", self.frac_noise, "at least 0 and less than 1")

    def check_noise_vocabulary(self) -> None:
        """For a task that knows noise: there are ids to make it of."""
        if self.frac_noise > 0:
            require(self.noise_vocab_size > 0, "noise_vocab_size", 0, f"at least 1, as frac_noise is {self.frac_noise}")


class RowGenerator(NamedTuple):
    """What draws rows one after the other: `draw(training)` gives the next one's inputs and targets, `width` each."""

    width: int
    draw: Callable[[bool], tuple[Sequence[int] | Integers, Sequence[int] | Integers]]


def make_task(
    name: str,
    original: str,
    row_generator: Callable[[MadSettings, int], RowGenerator],
    baseline: MadSettings,
    *,
    sweeps: Mapping[str, tuple[Any, ...]],
    train: int = 12_800,
    from_last: bool = False,
) -> Task[MadSettings]:
    """A task of MAD, from what makes its rows for some settings and a seed.

    It is made harder one setting at a time, through its `sweeps`; MAD's score of a model is the mean over all of them.
    Test rows follow the train rows out of one generator: those of a seed are other ones after another number of
    train rows.
    """

    def sample(settings: MadSettings, seed: int, train: int, test: int) -> tuple[Rows, Rows]:
        width, draw = row_generator(settings, seed)

        def rows(count: int, training: bool) -> Rows:
            made = np.full((2, count, width), IGNORE_INDEX, dtype=np.int64)
            for row in range(count):
                made[0, row], made[1, row] = draw(training)
            return Rows(made[0], made[1])

        return rows(train, True), rows(test, False)

    difficulties = tuple({name: value} for name, values in sweeps.items() for value in values)
    published = Published(f"athms/mad-lab, {original}", 12345, train, 1_280, 128, difficulties)
    return Task(f"mad/{name}", baseline, sample, {"macro": macro, "micro": micro}, published, from_last)
