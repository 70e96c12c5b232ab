"""Settings of multi-query associative recall, and the layout of its rows.

From Zoology: Measuring and Improving Recall in Efficient Language Models (Arora et al., ICLR 2024, arXiv:2312.04927).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kalmix.validation import require
from kalmix_bench.datasets.metrics import IGNORE_INDEX
from kalmix_bench.datasets.task import Integers, Rows


@dataclass(frozen=True)
class MqarSettings:
    """Settings of MQAR, named as in Zoology's code; the baseline is the first column of its Figure 2.

    Attributes:
        vocab_size: V.
        input_seq_len: N, an even number.
        num_kv_pairs: D, pairs per row. Each is queried once.
        power_a: a. The probability of a query g steps after the pairs is proportional to g^(a - 1); 1.0 is uniform.
        random_non_queries: whether random tokens, instead of zeros, fill the positions between queries.
    """

    vocab_size: int = 8192
    input_seq_len: int = 64
    num_kv_pairs: int = 4
    power_a: float = 0.01
    random_non_queries: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "input_seq_len", "num_kv_pairs"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(self.input_seq_len % 2 == 0, "input_seq_len", self.input_seq_len, "an even number")
        require(self.power_a > 0, "power_a", self.power_a, "a positive number")
        least = self.context_len + 2 * self.num_kv_pairs
        expected = f"at least {least}: {self.context_len} tokens of pairs, 2 for each of {self.num_kv_pairs} queries"
        require(self.input_seq_len >= least, "input_seq_len", self.input_seq_len, expected)

    @property
    def context_len(self) -> int:
        """Number of tokens before the first possible query."""
        return 2 * self.num_kv_pairs

    @property
    def gap_probabilities(self) -> NDArray[np.float64]:
        """Probability of each query position, nearest first; positions are two tokens apart."""
        steps = np.arange(1, (self.input_seq_len - self.context_len) // 2 + 1)
        p = self.power_a * steps ** (self.power_a - 1)
        return p / p.sum()


@dataclass(frozen=True)
class UpdateSettings(MqarSettings):
    """MQAR settings with `num_updates`, U: keys per row that get a new value after all pairs; it is the target."""

    num_updates: int = 4

    def __post_init__(self) -> None:
        require(
            0 <= self.num_updates <= self.num_kv_pairs,
            "num_updates",
            self.num_updates,
            f"from 0 to {self.num_kv_pairs} (`num_kv_pairs`)",
        )
        super().__post_init__()

    @property
    def context_len(self) -> int:
        """Number of tokens before the first possible query."""
        return 2 * (self.num_kv_pairs + self.num_updates)


def make_rows(settings: MqarSettings, pairs: Integers, keys: Integers, answers: Integers, gaps: Integers) -> Rows:
    """Return rows of pairs followed by queries.

    Args:
        settings: sizes.
        pairs: `[n, context_len]` tokens.
        keys, answers: `[n, D]` queried keys, and the target at each.
        gaps: `[n, D]` query positions, in steps of two tokens after the pairs.
    """
    count = len(pairs)
    at = settings.context_len + 2 * gaps
    inputs = np.zeros((count, settings.input_seq_len), dtype=np.int64)
    inputs[:, : settings.context_len] = pairs
    np.put_along_axis(inputs, at, keys, 1)
    targets = np.full_like(inputs, IGNORE_INDEX)
    np.put_along_axis(targets, at, answers, 1)
    facts = {"num_kv_pairs": settings.num_kv_pairs, "input_seq_len": settings.input_seq_len}
    if isinstance(settings, UpdateSettings):
        facts["num_updates"] = settings.num_updates
    return Rows(inputs, targets, {name: np.full(count, value) for name, value in facts.items()})


def interleave(keys: Integers, values: Integers) -> Integers:
    """Return keys and values `[..., D]` in alternation, `[..., 2 D]`."""
    return np.stack([keys, values], -1).reshape(*keys.shape[:-1], 2 * keys.shape[-1])
