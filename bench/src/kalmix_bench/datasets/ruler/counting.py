"""RULER's aggregation tasks: the ten most common words of a list, and the three most frequent words of a coded text.

A common word occurs `freq_cw` times in the list, any other `freq_ucw` times. A worked example with its own list comes
first. Below 4,096 tokens both lists are shorter, whatever the settings. The frequencies of coded words follow Zipf's
law; the most frequent "word" is dots, to be ignored. In short texts the fourth and fifth word may be equally frequent.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kalmix.validation import require
from kalmix_bench.datasets.ruler.haystacks import load_words
from kalmix_bench.datasets.ruler.prompts import Fit, Prompt, RulerSettings, make_task

_COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 "
    "words that appear most often in the list are:"
)
_CODED = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text? Answer: According to the coded text above, the "
    "three most frequently appeared words are:"
)


@dataclass(frozen=True)
class CommonSettings(RulerSettings):
    """Settings of the common-words task: `num_cw` words occur `freq_cw` times, others `freq_ucw` times.

    `num_fewshot` worked examples precede the question.
    """

    tokens_to_generate: int = 120
    freq_cw: int = 30
    freq_ucw: int = 3
    num_cw: int = 10
    num_fewshot: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.num_cw <= 20, "num_cw", self.num_cw, "from 1 to 20")
        require(self.freq_ucw >= 1, "freq_ucw", self.freq_ucw, "at least 1")
        require(self.freq_cw > self.freq_ucw, "freq_cw", self.freq_cw, f"above {self.freq_ucw} (`freq_ucw`)")
        require(self.num_fewshot >= 0, "num_fewshot", self.num_fewshot, "at least 0")


def common_words(settings: CommonSettings, seed: int, tokens: Callable[[str], int]) -> Iterator[Prompt]:
    """Yield prompts of at most `max_seq_length` tokens, endlessly.

    If more words are needed than are known, pairs of words are used in addition.
    """
    s, rng = settings, random.Random(seed)
    pairs, words = load_words(s.words)
    words = list(words)
    random.Random(seed).shuffle(words)
    long = s.max_seq_length >= 4096
    example_sizes, repeats = ((40, 10, 3), (s.freq_cw, s.freq_ucw)) if long else ((20, 3, 1), (6, 1))

    def listed(count: int, common: int, other: int) -> Prompt:
        known = words if count <= len(words) else words + rng.sample(pairs, count - len(words))
        sample = rng.sample(known, count)
        answers = tuple(sample[: s.num_cw])
        context = sample[: s.num_cw] * common + sample[s.num_cw :] * other
        random.Random(seed).shuffle(context)
        return Prompt(_COMMON.format(context=_numbered(context)), answers)

    def write(size: int) -> Prompt:
        examples = [listed(*example_sizes) for _ in range(s.num_fewshot)]
        question = listed(size, *repeats)
        examples_text = "\n".join(f"{example.text} {_numbered(example.answers)}" for example in examples)
        return Prompt(f"{examples_text}\n{question.text}", question.answers)

    limit = s.max_seq_length - s.tokens_to_generate
    fit = Fit(tokens, step=10, min_size=s.num_cw)
    size = fit.largest_size(write, limit, int(s.max_seq_length // fit.cost(write, 4096)) * 2)
    return fit.prompts(write, limit, size)


def _numbered(words: list[str] | tuple[str, ...]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


@dataclass(frozen=True)
class CodedSettings(RulerSettings):
    """Settings of the coded-words task: `coded_wordlen` letters per word, and `alpha`, the exponent of Zipf's law."""

    tokens_to_generate: int = 50
    alpha: float = 2.0
    coded_wordlen: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.alpha > 1, "alpha", self.alpha, "above 1")
        require(self.coded_wordlen >= 3, "coded_wordlen", self.coded_wordlen, "at least 3")
        min_size = 4 * 50 + self.tokens_to_generate
        require(
            self.max_seq_length >= min_size, "max_seq_length", self.max_seq_length, f"at least {min_size} (four words)"
        )


def frequent_words(settings: CodedSettings, seed: int, tokens: Callable[[str], int]) -> Iterator[Prompt]:
    """Yield prompts of at most `max_seq_length` tokens, endlessly; there is one coded word per fifty tokens."""
    s, rng = settings, random.Random(seed)
    limit = s.max_seq_length - s.tokens_to_generate
    ranks = np.arange(1, limit // 50 + 1)
    share = ranks**-s.alpha
    total = float(torch.special.zeta(torch.tensor(s.alpha, dtype=torch.float64), torch.ones((), dtype=torch.float64)))

    def coded() -> list[str]:
        """Return a vocabulary, the most frequent word first."""
        words = ["".join(rng.choices(string.ascii_lowercase, k=s.coded_wordlen)) for _ in ranks]
        while len(set(words)) < len(ranks):
            words.append("".join(rng.choices(string.ascii_lowercase, k=s.coded_wordlen)))
        words = sorted(set(words))
        random.Random(seed).shuffle(words)
        return ["...", *words[1:]]

    def written(load_words: list[str], size: int) -> Prompt:
        counts = (size * share / total).astype(int)
        text = [word for word, count in zip(load_words, counts, strict=True) for _ in range(count)]
        random.Random(seed).shuffle(text)
        return Prompt(_CODED.format(context=" ".join(text)), tuple(load_words[1:4]))

    step, size = limit // 32, limit // s.coded_wordlen
    first = coded()
    while tokens(written(first, size).text) < limit:
        size += step
    size -= step
    while True:
        load_words, candidate = coded(), size
        while (excess := tokens((prompt := written(load_words, candidate)).text) - limit) > 0:
            require(candidate > 0, "max_seq_length", f"too small by {excess}", "large enough for the question")
            candidate -= step
        yield prompt


COUNTING = (
    make_task("needle/common-words", "cwe", common_words, CommonSettings(max_seq_length=8192)),
    make_task("needle/frequent-words", "fwe", frequent_words, CodedSettings()),
)
