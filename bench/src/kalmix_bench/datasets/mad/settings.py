"""Settings of MAD's tasks, and the function that makes a task from a row generator.

From Mechanistic Design and Scaling of Hybrid Architectures (Poli et al., 2024, arXiv:2403.17844). Rows equal those of
the public code, athms/mad-lab, bit for bit, with its default of no data workers.
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
    """Settings of MAD, named as in its code. All tasks accept all settings and ignore those that do not apply.

    Attributes:
        vocab_size: V, special tokens and noise included.
        seq_len: T. Rows of the recall tasks are one token shorter, because targets are next tokens.
        frac_noise: fraction of pairs (in compression, of tokens) that are noise.
        noise_vocab_size: ids reserved for noise, even if `frac_noise` is 0.
        num_tokens_to_copy: tokens to copy in selective copying.
        k_motif_size, v_motif_size: largest number of tokens of a key and of a value in fuzzy recall.
        multi_query: whether every repeated key is queried, instead of only the last.
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
        """Check that ids are reserved for noise if there is any."""
        if self.frac_noise > 0:
            require(self.noise_vocab_size > 0, "noise_vocab_size", 0, f"at least 1, as frac_noise is {self.frac_noise}")


class RowGenerator(NamedTuple):
    """Generator of rows: `draw(training)` returns inputs and targets of the next row, `width` tokens each."""

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
    """Return a MAD task made of a row generator.

    Each mapping of `Published.difficulties` changes one setting, as `sweeps` lists them; MAD's score of a model is the
    mean over all of them. Training and test rows come from one generator, so the test rows of a seed change with the
    number of training rows.

    Args:
        name: name without the prefix "mad/".
        original: name in MAD's code.
        row_generator: function of settings and seed.
        baseline: default settings.
        sweeps: values of each setting that makes the task harder.
        train: number of training rows at the baseline.
        from_last: see `Task`.
    """

    def sample(settings: MadSettings, seed: int, train: int, test: int) -> tuple[Rows, Rows]:
        width, draw = row_generator(settings, seed)

        def rows(count: int, training: bool) -> Rows:
            pair = np.full((2, count, width), IGNORE_INDEX, dtype=np.int64)
            for row in range(count):
                pair[0, row], pair[1, row] = draw(training)
            return Rows(pair[0], pair[1])

        return rows(train, True), rows(test, False)

    difficulties = tuple({name: value} for name, values in sweeps.items() for value in values)
    published = Published(f"athms/mad-lab, {original}", 12345, train, 1_280, 128, difficulties)
    return Task(f"mad/{name}", baseline, sample, {"macro": macro, "micro": micro}, published, from_last)
