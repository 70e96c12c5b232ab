"""Zoology's MQAR, and its variant with updated keys; keys and values come from disjoint halves of the ids.

Segments equal those of the public code, HazyResearch/zoology, bit for bit.

Differences to know:

- A segment is drawn column by column: all keys, all values, all positions. Its first rows change with its size.
- The original code draws random tokens between queries from torch's global generator; here they are the ones after
  `torch.manual_seed(seed)`. They may equal keys of the row.
- In `mqar/forgetting` the new value differs from the value of the key whose index is that of the update, not of the
  updated key, so a key may keep its value.
- The task requires V > N. Long rows with few ids, as other papers report, are another task (see `recall/long`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kalmix.validation import require
from kalmix_bench.datasets.metrics import mean_row_accuracy, micro
from kalmix_bench.datasets.mqar.settings import MqarSettings, UpdateSettings, interleave, make_rows
from kalmix_bench.datasets.task import Integers, Published, Rows, Task

SegmentSpec = tuple[MqarSettings, int]  # settings and number of rows


def segment(settings: MqarSettings, seed: int, count: int) -> Rows:
    """Draw `count` rows of one seed, which must be below 2^32.

    Raises:
        ArgumentError: there are too few ids.
    """
    s = settings
    first = s.vocab_size // 2  # smallest value id; keys start at 1
    require(s.vocab_size > s.input_seq_len, "vocab_size", s.vocab_size, f"above {s.input_seq_len} (`input_seq_len`)")
    require(first - 1 >= s.num_kv_pairs, "vocab_size", s.vocab_size, f"at least {2 * s.num_kv_pairs + 2} (enough keys)")
    rng = np.random.RandomState(seed)

    def chosen(size: int, out_of: int, p: np.ndarray | None = None) -> Integers:
        """Return `size` distinct integers below `out_of` for each row."""
        picked = [rng.choice(out_of, size, replace=False, p=p) for _ in range(count)]
        return np.array(picked, dtype=np.int64).reshape(count, size)

    keys = 1 + chosen(s.num_kv_pairs, first - 1)
    values = first + chosen(s.num_kv_pairs, s.vocab_size - first)
    pairs, answers = interleave(keys, values), values
    if isinstance(s, UpdateSettings):
        updates = rng.randint(0, s.vocab_size - first - 1, (count, s.num_updates))
        new = first + updates + (updates >= values[:, : s.num_updates] - first)
        updated = chosen(s.num_updates, s.num_kv_pairs)
        answers = values.copy()
        np.put_along_axis(answers, updated, new, 1)
        pairs = np.hstack([pairs, interleave(np.take_along_axis(keys, updated, 1), new)])
    rows = make_rows(s, pairs, keys, answers, chosen(s.num_kv_pairs, len(s.gap_probabilities), s.gap_probabilities))
    if s.random_non_queries:
        fill = torch.randint(s.vocab_size, rows.inputs.shape, generator=torch.Generator().manual_seed(seed)).numpy()
        np.copyto(rows.inputs, fill, where=rows.inputs == 0)
    return rows


def segments(
    train: Sequence[SegmentSpec], test: Sequence[SegmentSpec], seed: int = 123
) -> tuple[list[Rows], list[Rows]]:
    """Draw several segments, as Zoology's `DataConfig` does with this seed.

    Each segment has its own seed: below 2^31 for training, from 2^31 on for tests. In Zoology a batch has rows of one
    segment.
    """
    rng = np.random.RandomState(seed)
    seeds = rng.randint(0, 2**31, len(train)), rng.randint(2**31, 2**32, len(test), dtype=np.int64)
    parts = [
        [segment(settings, int(seed), count) for (settings, count), seed in zip(split, split_seeds, strict=True)]
        for split, split_seeds in zip((train, test), seeds, strict=True)
    ]
    return parts[0], parts[1]


def test_seed(seed: int) -> int:
    """Return the seed of test rows for the training seed `seed`.

    It is the first integer in [2^31, 2^32) drawn by numpy's `RandomState(seed)`, so it never equals a training seed.
    """
    return int(np.random.RandomState(seed).randint(2**31, 2**32, dtype=np.int64))


def sample(settings: MqarSettings, seed: int, train: int, test: int) -> tuple[Rows, Rows]:
    """Draw one training segment with seed `seed` and one test segment with seed `test_seed(seed)`."""
    return segment(settings, seed, train), segment(settings, test_seed(seed), test)


SCORES = {"accuracy": mean_row_accuracy, "micro": micro}
FIGURE_2 = tuple({"input_seq_len": n, "num_kv_pairs": d} for n, d in ((64, 4), (128, 8), (256, 16), (512, 64)))

MQAR = Task(
    "mqar",
    MqarSettings(),
    sample,
    SCORES,
    Published("HazyResearch/zoology, multiquery_ar; Figure 2 of the paper", 123, 100_000, 3_000, 512, FIGURE_2),
)
FORGETTING = Task(
    "mqar/forgetting",
    UpdateSettings(),
    sample,
    SCORES,
    Published("HazyResearch/zoology, forgetting_mqar", 123, 100_000, 3_000, 512),
)
