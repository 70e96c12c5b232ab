"""MQAR with one vocabulary for keys and values, as Memory by Design has it: no id tells which of both it is.

Dowling et al., section 4.2 and appendix F; without public code, so these rows are ours. The paper does not say what
stands between queries (zeros here), nor whether an id may be a key and a value of one row (here it may). Of its two
stress tests, we read:

- `mqar/update`: U different keys are written once more after all pairs, each with another value than before.
- `mqar/block`: B keys, then their B values, then the next B.

Every row has drawn all it needs before the next one does, and test rows follow the train rows.
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
    """And `block_size`, B: keys that come before the first of their values does."""

    block_size: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = self.block_size >= 1 and self.num_kv_pairs % self.block_size == 0
        require(whole, "block_size", self.block_size, f"a divisor of num_kv_pairs, {self.num_kv_pairs}")


ContextAndAnswers = tuple[Integers, Integers]  # tokens of the context, and the answer to each key


def _base(settings: MqarSettings, keys: Integers, values: Integers, rng: np.random.Generator) -> ContextAndAnswers:
    return interleave(keys, values), values


def _update(settings: UpdateSettings, keys: Integers, values: Integers, rng: np.random.Generator) -> ContextAndAnswers:
    updated = rng.choice(len(keys), settings.num_updates, replace=False)
    answers = values.copy()
    for key in updated:
        while answers[key] == values[key]:
            answers[key] = rng.integers(1, settings.vocab_size)
    return np.append(interleave(keys, values), interleave(keys[updated], answers[updated])), answers


def _block(settings: BlockSettings, keys: Integers, values: Integers, rng: np.random.Generator) -> ContextAndAnswers:
    blocks = np.stack([keys.reshape(-1, settings.block_size), values.reshape(-1, settings.block_size)], 1)
    return blocks.ravel(), values


def draw_rows(
    settings: S,
    write: Callable[[S, Integers, Integers, np.random.Generator], ContextAndAnswers],
    rng: np.random.Generator,
    count: int,
) -> Rows:
    """`count` rows; keys and values are the first D of two permutations of the ids 1 ... V - 1."""
    size = settings.num_kv_pairs
    require(size < settings.vocab_size, "vocab_size", settings.vocab_size, f"at least {size + 1}, for {size} keys")
    require(settings.vocab_size >= 3, "vocab_size", settings.vocab_size, "at least 3, so that values can differ")
    pairs = np.empty((count, settings.context_len), dtype=np.int64)
    keys, answers, gaps = np.empty((3, count, size), dtype=np.int64)
    probabilities = settings.gap_probabilities
    for row in range(count):
        keys[row], values = (1 + rng.permutation(settings.vocab_size - 1)[:size] for _ in range(2))
        pairs[row], answers[row] = write(settings, keys[row], values, rng)
        gaps[row] = rng.choice(len(probabilities), size, replace=False, p=probabilities)
    made = make_rows(settings, pairs, keys, answers, gaps)
    if settings.random_non_queries:
        np.copyto(made.inputs, rng.integers(settings.vocab_size, size=made.inputs.shape), where=made.inputs == 0)
    return made


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
# Of the paper's grid N in {64, 128}, D in {4, 16}, U in {D, D/2, D/4, D/8}, what fits two tokens a query and is whole.
UPDATE = _task(
    "mqar/update",
    UpdateSettings(num_updates=4),
    _update,
    tuple(
        {"input_seq_len": n, "num_kv_pairs": d, "num_updates": u}
        for n, d in ((64, 4), (128, 4), (128, 16))
        for u in (d, d // 2, d // 4, d // 8)
        if u
    ),
)
BLOCK = _task(
    "mqar/block",
    BlockSettings(input_seq_len=128),
    _block,
    tuple({"num_kv_pairs": d} for d in (2, 4, 6, 8)),
)
