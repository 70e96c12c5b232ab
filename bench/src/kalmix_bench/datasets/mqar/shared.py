"""MQAR with one vocabulary for keys and values, as in Memory by Design, so that an id does not reveal its role.

From Dowling et al., section 4.2 and appendix F. There is no public code. The paper does not specify the tokens between
queries (zeros here) or whether an id may be both a key and a value of a row (allowed here). This module reads its two
stress tests as follows:

- `mqar/update`: U different keys are written again after all pairs, each with a new value.
- `mqar/rewrite`: the same with U keys drawn with replacement, so that a key may be written again more than once, as in
  the paper's example.
- `mqar/block`: B keys, then their B values, then the next B.

Rows are drawn one after the other; test rows follow the training rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from kalmix.validation import require
from kalmix_bench.datasets.mqar.settings import MqarSettings, UpdateSettings, interleave, make_rows
from kalmix_bench.datasets.mqar.zoology import FIGURE_2, SCORES
from kalmix_bench.datasets.task import Integers, Published, Rows, Task

S = TypeVar("S", bound=MqarSettings)


@dataclass(frozen=True)
class BlockSettings(MqarSettings):
    """MQAR settings with `block_size`, B: keys that precede the first of their values."""

    block_size: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        divides = self.block_size >= 1 and self.num_kv_pairs % self.block_size == 0
        require(divides, "block_size", self.block_size, f"a divisor of {self.num_kv_pairs} (`num_kv_pairs`)")


ContextAndAnswers = tuple[Integers, Integers]  # tokens of the context, and the target of each key


def _base(settings: MqarSettings, keys: Integers, values: Integers, rng: np.random.Generator) -> ContextAndAnswers:
    return interleave(keys, values), values


def _update(settings: UpdateSettings, keys: Integers, values: Integers, rng: np.random.Generator) -> ContextAndAnswers:
    updated = rng.choice(len(keys), settings.num_updates, replace=False)
    answers = values.copy()
    for key in updated:
        while answers[key] == values[key]:
            answers[key] = rng.integers(1, settings.vocab_size)
    return np.append(interleave(keys, values), interleave(keys[updated], answers[updated])), answers


def _rewrite(settings: UpdateSettings, keys: Integers, values: Integers, rng: np.random.Generator) -> ContextAndAnswers:
    answers, written = values.copy(), np.empty(settings.num_updates, dtype=np.int64)
    updated = rng.integers(len(keys), size=settings.num_updates)
    for place, key in enumerate(updated):
        before = answers[key]
        while answers[key] == before:
            answers[key] = rng.integers(1, settings.vocab_size)
        written[place] = answers[key]
    return np.append(interleave(keys, values), interleave(keys[updated], written)), answers


def _block(settings: BlockSettings, keys: Integers, values: Integers, rng: np.random.Generator) -> ContextAndAnswers:
    blocks = np.stack([keys.reshape(-1, settings.block_size), values.reshape(-1, settings.block_size)], 1)
    return blocks.ravel(), values


def draw_rows(
    settings: S,
    write: Callable[[S, Integers, Integers, np.random.Generator], ContextAndAnswers],
    rng: np.random.Generator,
    count: int,
) -> Rows:
    """Draw `count` rows; keys and values are the first D entries of two permutations of the ids 1 to V - 1."""
    size = settings.num_kv_pairs
    require(size < settings.vocab_size, "vocab_size", settings.vocab_size, f"at least {size + 1} (for {size} keys)")
    require(settings.vocab_size >= 3, "vocab_size", settings.vocab_size, "at least 3 (for two different values)")
    pairs = np.empty((count, settings.context_len), dtype=np.int64)
    keys, answers, gaps = np.empty((3, count, size), dtype=np.int64)
    probabilities = settings.gap_probabilities
    for row in range(count):
        keys[row], values = (1 + rng.permutation(settings.vocab_size - 1)[:size] for _ in range(2))
        pairs[row], answers[row] = write(settings, keys[row], values, rng)
        gaps[row] = rng.choice(len(probabilities), size, replace=False, p=probabilities)
    rows = make_rows(settings, pairs, keys, answers, gaps)
    if settings.random_non_queries:
        np.copyto(rows.inputs, rng.integers(settings.vocab_size, size=rows.inputs.shape), where=rows.inputs == 0)
    return rows


def _task(
    name: str,
    baseline: S,
    write: Callable[[S, Integers, Integers, np.random.Generator], ContextAndAnswers],
    difficulties: tuple[dict[str, int], ...],
) -> Task[S]:
    def sample(settings: S, seed: int, train: int, test: int) -> tuple[Rows, Rows]:
        rng = np.random.default_rng(seed)
        return draw_rows(settings, write, rng, train), draw_rows(settings, write, rng, test)

    source = "Memory by Design, section 4.2 and appendix F"
    return Task(name, baseline, sample, SCORES, Published(source, 0, 100_000, 100_000, 256, difficulties))


SHARED = _task("mqar/shared", MqarSettings(), _base, FIGURE_2)
# The paper's grid: N in {64, 128}, D in {4, 16}, U in {D, D/2, D/4, D/8}; without settings that do not fit N tokens.
_GRID = tuple(
    {"input_seq_len": n, "num_kv_pairs": d, "num_updates": u}
    for n, d in ((64, 4), (128, 4), (128, 16))
    for u in (d, d // 2, d // 4, d // 8)
    if u
)
UPDATE = _task("mqar/update", UpdateSettings(num_updates=4), _update, _GRID)
REWRITE = _task("mqar/rewrite", UpdateSettings(num_updates=4), _rewrite, _GRID)
BLOCK = _task(
    "mqar/block",
    BlockSettings(input_seq_len=128),
    _block,
    tuple({"num_kv_pairs": d} for d in (2, 4, 6, 8)),
)
