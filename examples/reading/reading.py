"""Rows of the tasks in `reading_*.yaml`: lm-evaluation-harness on your own text.

    kalmix train --output runs/mine
    lm_eval run --model hf --model_args pretrained=runs/mine/model,trust_remote_code=True,add_bos_token=True \
        --include_path examples/reading --tasks reading --batch_size 8

The text is the one that `kalmix train` holds out: of this Python's documentation, or of a file or folder given to both
(`--text FOLDER` there, `--metadata '{"text": "FOLDER"}'` here). Nothing is downloaded. The seed of rows is
fixed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from datasets import Dataset

from kalmix.training.corpus import load_corpus

MAX_ROWS = 200  # of each task
CONTEXT, ENDING, LINE = 48, 12, 10  # words


def documents(text: str | None = None, **_: Any) -> dict[str, Dataset]:
    """Return held-out documents."""
    return _test({"text": document} for document in _held_out(text))


def endings(text: str | None = None, **_: Any) -> dict[str, Dataset]:
    """Return passages with four endings: the true one and three of other passages."""
    passages, draw = _passages(text, CONTEXT + ENDING), random.Random(0)
    tails = [" ".join(words[CONTEXT:]) for words in passages]

    def rows() -> Iterator[dict[str, Any]]:
        for words, tail in zip(passages, tails, strict=True):
            endings = [tail, *draw.sample([other for other in tails if other != tail], 3)]
            draw.shuffle(endings)
            yield {"context": " ".join(words[:CONTEXT]), "endings": endings, "label": endings.index(tail)}

    return _test(rows())


def last_words(text: str | None = None, **_: Any) -> dict[str, Dataset]:
    """Return passages whose last word occurred earlier in the passage."""

    def rows() -> Iterator[dict[str, Any]]:
        for words in _passages(text, CONTEXT):
            again = [at for at in range(len(words) // 2, len(words)) if len(words[at]) > 4 and words[at] in words[:at]]
            if again:
                yield {"context": " ".join(words[: again[-1]]), "word": words[again[-1]]}

    return _test(rows())


def echoes(text: str | None = None, **_: Any) -> dict[str, Dataset]:
    """Return prompts with a line twice and its first half a third time, and the second half."""
    lines = (words[:LINE] for words in _passages(text, CONTEXT))
    half = LINE // 2
    return _test(
        {"prompt": "\n".join([" ".join(line)] * 2 + [" ".join(line[:half])]), "rest": " ".join(line[half:])}
        for line in lines
    )


def _passages(text: str | None, size: int) -> list[list[str]]:
    """Return up to `MAX_ROWS` passages of `size` words, spread over the held-out documents."""
    found = []
    for document in _held_out(text):
        words = document.split()
        found += [words[at : at + size] for at in range(0, len(words) - size + 1, size)]
    return found[:: max(1, len(found) // MAX_ROWS)][:MAX_ROWS]


@cache
def _held_out(text: str | None) -> tuple[str, ...]:
    return load_corpus(text).held_out


def _test(rows: Iterable[dict[str, Any]]) -> dict[str, Dataset]:
    return {"test": Dataset.from_list(list(rows))}
