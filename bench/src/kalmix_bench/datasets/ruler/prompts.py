"""Prompts of RULER's tasks: fitting them to a length, and converting them to rows.

From RULER: What's the Real Context Size of Your Long-Context Language Models? (Hsieh et al., COLM 2024,
arXiv:2404.06654). Texts are those of the public code, NVIDIA/RULER, Apache-2.0. With the same words, essay, sentence
splitter and tokenizer, prompts are equal.

Differences to know:

- The original code loops forever if the smallest haystack exceeds the length. Here the haystack shrinks further, and
  an error is raised if even that does not fit.
- A length includes `tokens_to_generate` tokens of the expected answer.
- A prompt that is too long is drawn again with a haystack smaller by a whole step (500 words of an essay), so some
  rows are far below the requested length. The metadata "length" gives the length of each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from kalmix.validation import require
from kalmix_bench.datasets.metrics import IGNORE_INDEX, exact_match, micro, string_match
from kalmix_bench.datasets.task import Published, Rows, Task

END_ID = 256  # id after the 256 bytes: end of answer, and padding
ANSWER_SEPARATOR = ", "  # between several answers
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class RulerSettings:
    """Settings of all RULER tasks, named as in its code, with two more for its sources of text.

    Attributes:
        max_seq_length: tokens of a prompt and its answer; bytes in `kalmix_bench.datasets.make`.
        tokens_to_generate: tokens of these that are reserved for the answer.
        words: "wonderwords" (RULER's source, a package) or "builtin" (a short list; prompts then differ from RULER's).
            Default: "wonderwords" if it is installed.
    """

    max_seq_length: int = 4096
    tokens_to_generate: int = 128
    words: str = field(default_factory=lambda: "wonderwords" if find_spec("wonderwords") else "builtin")

    def __post_init__(self) -> None:
        require(self.tokens_to_generate >= 1, "tokens_to_generate", self.tokens_to_generate, "at least 1")
        min_size = self.tokens_to_generate + 1
        require(self.max_seq_length >= min_size, "max_seq_length", self.max_seq_length, f"at least {min_size}")
        require(self.words in ("wonderwords", "builtin"), "words", repr(self.words), "'wonderwords' or 'builtin'")

    @property
    def vocab_size(self) -> int:
        """Number of ids of rows of bytes."""
        return END_ID + 1


class Prompt(NamedTuple):
    """Text to be continued with all `answers`; `answer_offset` is the index of the first answer's character in it."""

    text: str
    answers: tuple[str, ...]
    answer_offset: int | None = None


@dataclass(frozen=True, eq=False)
class Prompts(Rows):
    """Rows of texts. `inputs` is the text followed by the answer; only the answer is a target.

    Attributes:
        texts: prompts.
        answers: expected answers of each prompt.
        metadata: "length", tokens of text and answer; and, if the answer has one position, "depth", the fraction of the
            text's tokens before the first answer.
    """

    texts: tuple[str, ...] = ()
    answers: tuple[tuple[str, ...], ...] = ()


S = TypeVar("S", bound=RulerSettings)
Writer = Callable[
    [S, int, Callable[[str], int]], Iterator[Prompt]
]  # settings, seed, function that counts a text's tokens


def draw(writer: Writer[S], settings: S, seed: int, count: int, encode: Encode, end: int) -> Prompts:
    """Draw `count` prompts of a seed; see `TextTask.prompts`."""
    s = settings
    prompts = list(islice(writer(s, seed, lambda text: len(encode(text))), count))
    inputs, targets = np.full((2, count, s.max_seq_length), end, dtype=np.int64)
    targets[:] = IGNORE_INDEX
    facts: dict[str, list[float]] = {"length": [], "depth": []}
    for row, prompt in enumerate(prompts):
        question, answer = list(encode(prompt.text)), [*encode(" " + ANSWER_SEPARATOR.join(prompt.answers)), end]
        sequence = question + answer
        expected = f"at least {len(sequence) - 1} (a prompt and its answer)"
        require(len(sequence) - 1 <= s.max_seq_length, "max_seq_length", s.max_seq_length, expected)
        inputs[row, : len(sequence) - 1] = sequence[:-1]
        targets[row, len(question) - 1 : len(sequence) - 1] = answer
        facts["length"].append(len(question) + s.tokens_to_generate)
        if prompt.answer_offset is not None:
            facts["depth"].append(len(encode(prompt.text[: prompt.answer_offset])) / len(question))
    known = {name: np.array(values) for name, values in facts.items() if len(values) == count}
    return Prompts(inputs, targets, known, tuple(p.text for p in prompts), tuple(p.answers for p in prompts))


Write = Callable[[int], Prompt]  # writes a prompt with a haystack of this size


@dataclass(frozen=True)
class Fit:
    """Search for the size of haystacks that fits a length.

    Attributes:
        tokens: function that counts a text's tokens.
        step: smallest size that RULER tries, and the amount by which a haystack shrinks.
        min_size: smallest possible size, tried if `step` is too large.
    """

    tokens: Callable[[str], int]
    step: int
    min_size: int

    def cost(self, write: Write, size: int = 0) -> float:
        """Return the tokens per unit of haystack of a prompt of this size; by default, of the smallest size that RULER
        tries.
        """
        size = size or max(self.step, self.min_size)
        return self.tokens(write(size).text) / size

    def largest_size(self, write: Write, limit: int, bound: int) -> int:
        """Return the largest size up to `bound` whose prompt has at most `limit` tokens; `min_size` if there is none.

        A binary search as in RULER's code, which draws a prompt at every try.
        """
        step = max(self.step, self.min_size)
        size = self._search(write, limit, step, max(bound, 2 * step))
        return size or self._search(write, limit, self.min_size, step - 1) or self.min_size

    def _search(self, write: Write, limit: int, low: int, high: int) -> int:
        best = 0
        while low <= high:
            middle = (low + high) // 2
            if self.tokens(write(middle).text) <= limit:
                best, low = middle, middle + 1
            else:
                high = middle - 1
        return best

    def prompts(self, write: Write, limit: int, size: int) -> Iterator[Prompt]:
        """Yield prompts of at most `limit` tokens, endlessly. A prompt that is too long is drawn again with a smaller
        haystack.

        Raises:
            ArgumentError: a prompt with the smallest haystack is too long.
        """
        while True:
            candidate, prompt = size, write(size)
            while (excess := self.tokens(prompt.text) - limit) > 0:
                require(
                    candidate > self.min_size,
                    "max_seq_length",
                    f"too small by {excess}",
                    "large enough for the smallest haystack",
                )
                candidate = max(self.min_size, candidate - (self.step if candidate > self.step else 1))
                prompt = write(candidate)
            yield prompt


def byte_string_match(predicted: ArrayLike, targets: ArrayLike) -> float:
    """Return RULER's score of rows of bytes under teacher forcing.

    Each byte is predicted from the correct previous ones. If all bytes of an answer are correct, greedy decoding gives
    the same answer; otherwise the two may differ.
    """
    predicted, targets = np.asarray(predicted), np.asarray(targets)
    texts = [[_text(x[t != IGNORE_INDEX]) for x, t in zip(ids, targets, strict=True)] for ids in (predicted, targets)]
    return string_match(texts[0], [text.strip().split(ANSWER_SEPARATOR) for text in texts[1]])


def _text(ids: np.ndarray) -> str:
    return bytes(ids[(ids >= 0) & (ids < END_ID)].tolist()).decode(errors="replace")


@dataclass(frozen=True)
class TextTask(Task[S]):
    """Task whose rows are texts.

    Attributes:
        writer: function that yields its prompts.
    """

    writer: Writer[S] = field(kw_only=True)

    def prompts(self, *, seed: int, count: int, encode: Encode, end: int, **settings: Any) -> Prompts:
        """Draw `count` prompts with a tokenizer; lengths are then counted in its tokens.

        Args:
            seed: seed of the prompts.
            count: number of prompts.
            encode: function from a text to its ids, without special tokens.
            end: id that ends an answer and pads rows at the right to `max_seq_length`.
            settings: settings that differ from the baseline.

        Raises:
            ArgumentError: no prompt fits the length, or an answer does not fit after its prompt.
        """
        return draw(self.writer, self.configure(**settings), seed, count, encode, end)


def make_task(name: str, original: str, writer: Writer[S], baseline: S) -> TextTask[S]:
    """Return a RULER task with rows of bytes; of a seed's prompts, the first are for training."""

    def sample(settings: S, seed: int, train: int, test: int) -> tuple[Rows, Rows]:
        data = draw(writer, settings, seed, train + test, str.encode, END_ID)
        return select_prompts(data, slice(train)), select_prompts(data, slice(train, None))

    lengths: tuple[Mapping[str, Any], ...] = tuple({"max_seq_length": 1024 * n} for n in (4, 8, 16, 32, 64, 128))
    scores = {"string_match": byte_string_match, "exact_match": exact_match, "micro": micro}
    published = Published(f"NVIDIA/RULER, {original}", 42, 0, 500, 1, lengths)
    return TextTask(name, baseline, sample, scores, published, writer=writer)


def select_prompts(prompts: Prompts, rows: slice) -> Prompts:
    """Return a slice of prompts."""
    facts = {name: fact[rows] for name, fact in prompts.metadata.items()}
    return Prompts(prompts.inputs[rows], prompts.targets[rows], facts, prompts.texts[rows], prompts.answers[rows])
