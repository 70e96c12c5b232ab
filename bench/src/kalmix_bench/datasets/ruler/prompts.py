"""What the tasks of RULER share: prompts that fill a length, their answers, and how they become rows.

Hsieh et al., RULER: What's the Real Context Size of Your Long-Context Language Models?, COLM 2024 (arXiv:2404.06654);
public code NVIDIA/RULER, Apache-2.0. What prompts say is its text. With the same words, essay, sentences and
tokenizer, prompts are the same, too. Traps:

- There, a length in which the least haystack does not fit never ends; here the haystack shrinks further, and if it
  cannot, the length is refused.
- A length counts the tokens of the answer that is waited for, `tokens_to_generate` of them.
- A prompt that comes out too long is drawn again with a haystack smaller by a whole step (of essays, 500 words), so
  some rows are far below the length asked for; "length" among their facts says how long each is.
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

END_ID = 256  # the id after all bytes: ends an answer, and pads
ANSWER_SEPARATOR = ", "  # answers, where there are several
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class RulerSettings:
    """Settings of all tasks, by the names of RULER's code, and two for what it takes from elsewhere.

    Attributes:
        max_seq_length: tokens of a prompt and its answer, by the tokenizer; bytes in `kalmix_bench.datasets.make`.
        tokens_to_generate: of these, how many are for the answer.
        words: "wonderwords" (RULER's, from the package of this name), or "own": a short list of ours, with which
            prompts are not RULER's. The first where it is installed, unless said.
    """

    max_seq_length: int = 4096
    tokens_to_generate: int = 128
    words: str = field(default_factory=lambda: "wonderwords" if find_spec("wonderwords") else "builtin")

    def __post_init__(self) -> None:
        require(self.tokens_to_generate >= 1, "tokens_to_generate", self.tokens_to_generate, "at least 1")
        min_size = self.tokens_to_generate + 1
        require(self.max_seq_length >= min_size, "max_seq_length", self.max_seq_length, f"at least {min_size}")
        require(self.words in ("wonderwords", "builtin"), "words", repr(self.words), "'wonderwords' or 'own'")

    @property
    def vocab_size(self) -> int:
        """Of rows of bytes."""
        return END_ID + 1


class Prompt(NamedTuple):
    """A text whose continuation is to hold all `answers`; `found`: the character of it where the first one stands."""

    text: str
    answers: tuple[str, ...]
    answer_offset: int | None = None


@dataclass(frozen=True, eq=False)
class Prompts(Rows):
    """Rows that are texts; `inputs` and `targets` are theirs with the answer behind, of which alone targets ask.

    Attributes:
        texts: what a model is given.
        answers: what its continuation is to hold.
        facts: "length", tokens of text and answer, and where it has one place "depth", the part of the text before
            the first answer, by tokens.
    """

    texts: tuple[str, ...] = ()
    answers: tuple[tuple[str, ...], ...] = ()


S = TypeVar("S", bound=RulerSettings)
Writer = Callable[[S, int, Callable[[str], int]], Iterator[Prompt]]  # settings, seed, how many tokens a text has


def draw(writer: Writer[S], settings: S, seed: int, count: int, encode: Encode, end: int) -> Prompts:
    """`count` prompts of a seed; see `TextTask.prompts`."""
    s = settings
    prompts = list(islice(writer(s, seed, lambda text: len(encode(text))), count))
    inputs, targets = np.full((2, count, s.max_seq_length), end, dtype=np.int64)
    targets[:] = IGNORE_INDEX
    facts: dict[str, list[float]] = {"length": [], "depth": []}
    for row, prompt in enumerate(prompts):
        asked, answer = list(encode(prompt.text)), [*encode(" " + ANSWER_SEPARATOR.join(prompt.answers)), end]
        whole = asked + answer
        expected = f"at least {len(whole) - 1}, for a prompt and its answer"
        require(len(whole) - 1 <= s.max_seq_length, "max_seq_length", s.max_seq_length, expected)
        inputs[row, : len(whole) - 1] = whole[:-1]
        targets[row, len(asked) - 1 : len(whole) - 1] = answer
        facts["length"].append(len(asked) + s.tokens_to_generate)
        if prompt.answer_offset is not None:
            facts["depth"].append(len(encode(prompt.text[: prompt.answer_offset])) / len(asked))
    known = {name: np.array(values) for name, values in facts.items() if len(values) == count}
    return Prompts(inputs, targets, known, tuple(p.text for p in prompts), tuple(p.answers for p in prompts))


Write = Callable[[int], Prompt]  # a prompt with a haystack of this size


@dataclass(frozen=True)
class Fit:
    """How large haystacks are.

    Attributes:
        tokens: how many a text has.
        step: the smallest size tried by RULER, and by how much a haystack shrinks.
        least: the smallest possible, tried where `step` is too large.
    """

    tokens: Callable[[str], int]
    step: int
    min_size: int

    def cost(self, write: Write, size: int = 0) -> float:
        """Tokens that one more of a haystack costs, from a prompt of this size, or of the smallest that RULER tries."""
        size = size or max(self.step, self.min_size)
        return self.tokens(write(size).text) / size

    def largest_size(self, write: Write, limit: int, bound: int) -> int:
        """The largest size up to `bound` with which a prompt has at most `limit` tokens; `least` if none has.

        Searched for as RULER does it, drawing a prompt at every try.
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
        """Prompts of at most `limit` tokens, without end; one too long is drawn again, of a smaller haystack.

        Raises:
            ArgumentError: a prompt with the least haystack is too long.
        """
        while True:
            tried, prompt = size, write(size)
            while (excess := self.tokens(prompt.text) - limit) > 0:
                require(
                    tried > self.min_size,
                    "max_seq_length",
                    f"too small by {excess}",
                    "large enough for the least haystack",
                )
                tried = max(self.min_size, tried - (self.step if tried > self.step else 1))
                prompt = write(tried)
            yield prompt


def byte_string_match(predicted: ArrayLike, targets: ArrayLike) -> float:
    """RULER's score of rows of bytes, each byte predicted from those wanted before it.

    Where all bytes of an answer are right, a greedy continuation is the answer; otherwise the two may differ.
    """
    predicted, targets = np.asarray(predicted), np.asarray(targets)
    texts = [[_text(x[t != IGNORE_INDEX]) for x, t in zip(ids, targets, strict=True)] for ids in (predicted, targets)]
    return string_match(texts[0], [text.strip().split(ANSWER_SEPARATOR) for text in texts[1]])


def _text(ids: np.ndarray) -> str:
    return bytes(ids[(ids >= 0) & (ids < END_ID)].tolist()).decode(errors="replace")


@dataclass(frozen=True)
class TextTask(Task[S]):
    """A task whose rows are texts.

    Attributes:
        writer: makes its prompts.
    """

    writer: Writer[S] = field(kw_only=True)

    def prompts(self, *, seed: int, count: int, encode: Encode, end: int, **settings: Any) -> Prompts:
        """`count` prompts under a tokenizer, whose tokens then are what lengths are counted in.

        Args:
            encode: a text's ids, without special ones.
            end: the id that ends an answer, and pads rows at their right to `max_seq_length`.

        Raises:
            ArgumentError: no prompt is as short, or an answer does not fit behind its prompt.
        """
        return draw(self.writer, self.configure(**settings), seed, count, encode, end)


def make_task(name: str, original: str, writer: Writer[S], baseline: S) -> TextTask[S]:
    """A task of RULER, whose rows are spelled in bytes; of a seed's prompts, the first are to train on."""

    def sample(settings: S, seed: int, train: int, test: int) -> tuple[Rows, Rows]:
        every = draw(writer, settings, seed, train + test, str.encode, END_ID)
        return select_prompts(every, slice(train)), select_prompts(every, slice(train, None))

    lengths: tuple[Mapping[str, Any], ...] = tuple({"max_seq_length": 1024 * n} for n in (4, 8, 16, 32, 64, 128))
    scores = {"string_match": byte_string_match, "exact_match": exact_match, "micro": micro}
    published = Published(f"NVIDIA/RULER, {original}", 42, 0, 500, 1, lengths)
    return TextTask(name, baseline, sample, scores, published, writer=writer)


def select_prompts(prompts: Prompts, rows: slice) -> Prompts:
    """Some of them."""
    facts = {name: fact[rows] for name, fact in prompts.metadata.items()}
    return Prompts(prompts.inputs[rows], prompts.targets[rows], facts, prompts.texts[rows], prompts.answers[rows])
