"""RULER's variable tracking: chains of assignments hidden in noise; which variables have the value of the first?

A worked example comes first, with new names in every prompt. If there are several chains, the first is queried.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kalmix.errors import ArgumentError
from kalmix.validation import require
from kalmix_bench.datasets.ruler.haystacks import NOISE
from kalmix_bench.datasets.ruler.prompts import Fit, Prompt, RulerSettings, Write, make_task

_TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find "
    "all variables that are assigned the value {query} in the text above. Answer: According to the chain(s) of "
    "variable assignment in the text above, {count} variables are assigned the value {query}, they are: "
)
_EXAMPLE_TOKENS = 500
_VALUE = "12345"  # placeholder in the example


@dataclass(frozen=True)
class TrackingSettings(RulerSettings):
    """Settings of variable tracking: `num_chains` chains of `num_hops` assignments after the first."""

    tokens_to_generate: int = 30
    num_chains: int = 1
    num_hops: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.num_chains >= 1, "num_chains", self.num_chains, "at least 1")
        require(1 <= self.num_hops <= 10, "num_hops", self.num_hops, "from 1 to 10")


def prompts(settings: TrackingSettings, seed: int, tokens: Callable[[str], int]) -> Iterator[Prompt]:
    """Yield prompts of at most `max_seq_length` tokens, endlessly."""
    s, rng, values = settings, random.Random(seed), np.random.RandomState(seed)
    links = s.num_hops + 1

    def name(letters: int) -> str:
        return "".join(rng.choices(string.ascii_uppercase, k=letters))

    def write(size: int, letters: int = 5, value: str | None = None) -> Prompt:
        names = [name(letters) for _ in range(links * s.num_chains)]
        while len(set(names)) < len(names):
            names = [name(letters) for _ in names]
        chains = [names[start : start + links] for start in range(0, len(names), links)]
        numbers = [value or str(values.randint(10000, 99999)) for _ in chains]
        lines = [NOISE] * size
        for chain, number in zip(chains, numbers, strict=True):
            said = [f"VAR {chain[0]} = {number}"]
            said += [f"VAR {after} = VAR {before} " for before, after in pairwise(chain)]
            for passed, position in enumerate(sorted(rng.sample(range(len(lines)), links))):
                lines.insert(position + passed, said[passed])
        text = _TEMPLATE.format(context="\n".join(lines), query=numbers[0], count=links)
        return Prompt(text, tuple(chains[0]), text.find(chains[0][0]))

    def renamed(text: str, names: tuple[str, ...]) -> str:
        for old in names:
            text = text.replace(old, name(len(old)))
        return text.replace(_VALUE, str(values.randint(10000, 99999)))

    example = _example(lambda size: write(size, 3, _VALUE), Fit(tokens, step=5, min_size=links))
    example_text = f"{example.text} {' '.join(example.answers)}\n"

    def after_example(size: int) -> Prompt:
        prompt = write(size)
        before = renamed(example_text, example.answers) + "\n"
        return Prompt(before + prompt.text, prompt.answers, len(before) + (prompt.answer_offset or 0))

    limit = s.max_seq_length - s.tokens_to_generate
    fit = Fit(tokens, step=10 if s.max_seq_length >= 4096 else 5, min_size=links)
    size = fit.largest_size(write, limit - tokens(example_text), int(s.max_seq_length / fit.cost(write) * 3))
    return fit.prompts(after_example, limit, size)


def _example(write: Write, fit: Fit) -> Prompt:
    """Return a prompt of at most 500 tokens, or the shortest possible one."""
    size = fit.largest_size(write, _EXAMPLE_TOKENS, int(_EXAMPLE_TOKENS / fit.cost(write) * 3))
    try:
        return next(fit.prompts(write, _EXAMPLE_TOKENS, size))
    except ArgumentError:
        return write(fit.min_size)


TRACKING = make_task("needle/variable-tracking", "vt", prompts, TrackingSettings())
