"""RULER's needle tasks: sentences that state a key's value are hidden in a long text; then keys are queried.

The haystack is one line repeated ("noise"), an "essay", or other needles ("needle"). In an essay, depths are drawn
without replacement from 40 values between its start and its end.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from kalmix.validation import check_choice, require
from kalmix_bench.datasets.ruler.haystacks import NOISE, essay, load_words, split_sentences
from kalmix_bench.datasets.ruler.prompts import Fit, Prompt, RulerSettings, make_task

_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_TEMPLATE = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in the provided "
    "text? The special magic {kind} for {query} mentioned in the provided text are"
)
_DEPTHS = np.round(np.linspace(0, 100, 40)).astype(int).tolist()
_KINDS = ("numbers", "words", "uuids")


@dataclass(frozen=True)
class NeedleSettings(RulerSettings):
    """Settings of the needle tasks.

    Attributes:
        type_haystack: "noise", "essay" or "needle".
        type_needle_k, type_needle_v: type of keys and of values: "numbers", "words" or "uuids".
        num_needle_k, num_needle_v, num_needle_q: numbers of keys, of values per key, and of queried keys.
        essay: path of a text; Python's language reference if empty.
    """

    type_haystack: str = "noise"
    type_needle_k: str = "words"
    type_needle_v: str = "numbers"
    num_needle_k: int = 1
    num_needle_v: int = 1
    num_needle_q: int = 1
    essay: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        haystacks = ("noise", "essay", "needle")
        check_choice("type_haystack", self.type_haystack, haystacks)
        for name in ("type_needle_k", "type_needle_v"):
            check_choice(name, getattr(self, name), _KINDS)
        for name in ("num_needle_k", "num_needle_v", "num_needle_q"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        if self.type_haystack == "essay":
            most = len(_DEPTHS)
            require(self.needles <= most, "num_needle_k", self.keys, f"at most {most // self.num_needle_v} in an essay")

    @property
    def keys(self) -> int:
        return max(self.num_needle_k, self.num_needle_q)

    @property
    def needles(self) -> int:
        return self.keys * self.num_needle_v


def prompts(settings: NeedleSettings, seed: int, tokens: Callable[[str], int]) -> Iterator[Prompt]:
    """Yield prompts of at most `max_seq_length` tokens, endlessly."""
    s, rng = settings, random.Random(seed)
    single = s.num_needle_q * s.num_needle_v == 1

    def drawn(kind: str) -> str:
        if kind == "numbers":
            return str(rng.randint(10**6, 10**7 - 1))
        if kind == "words":
            return rng.choice(load_words(s.words)[0])
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))

    def needle(key: str, value: str) -> str:
        return _NEEDLE.format(kind=s.type_needle_v, key=key, value=value)

    def in_essay(hidden: list[str], size: int) -> str:
        words = essay(s.essay)
        text = split_sentences(" ".join((words * -(-size // len(words)))[:size]))
        cuts = [0, *sorted(int(len(text) * (depth / 100)) for depth in rng.sample(_DEPTHS, len(hidden))), len(text)]
        pieces = [" ".join(text[start:stop]) for start, stop in pairwise(cuts)]
        return " ".join([*(part for pair in zip(pieces, hidden, strict=False) for part in pair), pieces[-1]])

    def in_lines(hidden: list[str], size: int) -> str:
        if s.type_haystack == "noise":
            lines = [NOISE] * size
        else:
            lines = [needle(drawn(s.type_needle_k), drawn(s.type_needle_v)) for _ in range(size)]
        positions = sorted(rng.sample(range(size), len(hidden)), reverse=True)
        for position, line in zip(positions, hidden, strict=True):
            lines.insert(position, line)
        return "\n".join(lines)

    def write(size: int) -> Prompt:
        bindings: list[tuple[str, tuple[str, ...]]] = []
        for _ in range(s.keys):
            key = drawn(s.type_needle_k)
            bindings.append((key, tuple(drawn(s.type_needle_v) for _ in range(s.num_needle_v))))
        hidden = [needle(key, value) for key, values in bindings for value in values]
        random.Random(seed).shuffle(hidden)
        context = in_essay(hidden, size) if s.type_haystack == "essay" else in_lines(hidden, size)
        queries = [bindings[i] for i in rng.sample(range(s.keys), s.num_needle_q)]
        *most, last = (key for key, _ in queries)
        text = (_single(_TEMPLATE) if single else _TEMPLATE).format(
            kind=s.type_needle_v[:-1] if single else s.type_needle_v,
            context=context,
            query=f"{', '.join(most)}, and {last}" if most else last,
        )
        answers = tuple(value for _, values in queries for value in values)
        return Prompt(text, answers, text.find(answers[0]))

    limit = s.max_seq_length - s.tokens_to_generate
    if s.type_haystack == "essay":
        fit = Fit(tokens, step=500, min_size=1)
    else:
        fit = Fit(tokens, step=25 if s.max_seq_length >= 4096 else 5, min_size=s.needles)
    size = fit.largest_size(write, limit, int(s.max_seq_length / fit.cost(write) * 3))
    return fit.prompts(write, limit, size)


def _single(template: str) -> str:
    """Return the template in the singular, for one value of one key."""
    for many, one in (("Some", "A"), ("are all", "is"), ("are", "is")):
        template = template.replace(many, one)
    return template


_NOISE = NeedleSettings()
_ESSAY = replace(_NOISE, type_haystack="essay")
_NEEDLES = replace(_NOISE, type_haystack="needle")
NEEDLES = tuple(
    make_task(f"needle/{name}", f"niah_{name.replace('-', '_')}", prompts, baseline)
    for name, baseline in {
        "single-1": _NOISE,
        "single-2": _ESSAY,
        "single-3": replace(_ESSAY, type_needle_v="uuids"),
        "multikey-1": replace(_ESSAY, num_needle_k=4),
        "multikey-2": _NEEDLES,
        "multikey-3": replace(_NEEDLES, type_needle_k="uuids", type_needle_v="uuids"),
        "multivalue": replace(_ESSAY, num_needle_v=4),
        "multiquery": replace(_ESSAY, num_needle_q=4),
    }.items()
)
