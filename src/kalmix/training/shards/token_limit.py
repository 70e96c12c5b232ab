"""Limit on the training tokens of a corpus: divide it among the parts of the source, for any number of workers."""

from __future__ import annotations

from collections.abc import Iterator

from kalmix.training.shards.parts import Part
from kalmix.training.shards.tokenize_part import Finished, Job, finished, training_tokens

_SHARES = 64  # parts that are read at once, at most
_SMALLEST_SHARE = 1 << 20  # tokens of a part, unless it ends before


def first_parts(parts: list[Part], max_tokens: int | None) -> list[Part]:
    """Return the parts that are read first: one for each 2**20 tokens of the limit, from 1 to 64; all without a limit.

    Args:
        parts: parts of the source.
        max_tokens: number of training tokens, or `None` for no limit.
    """
    return parts if max_tokens is None else parts[: max(1, min(_SHARES, max_tokens // _SMALLEST_SHARE))]


def rounds(job: Job, parts: list[Part], max_tokens: int | None) -> Iterator[list[Part]]:
    """Yield lists of parts to tokenise, each part with its limit. The caller finishes a list before it takes the next.

    The first parts share the limit equally. What they lack, since some end before, further parts supply; after the last
    part, those that have not ended continue. The lists follow from the source and the limit alone, also when an
    interrupted preparation continues.

    Args:
        job: settings of the parts.
        parts: parts of the source.
        max_tokens: number of training tokens, or `None` for no limit.
    """
    if max_tokens is None:
        yield parts
        return
    fresh, stopped = list(parts), list[Part]()
    taken = {part.number: 0 for part in parts}
    while (left := max_tokens - sum(taken.values())) > 0 and (fresh or stopped):
        chosen = first_parts(fresh or stopped, left)
        if fresh:
            fresh = fresh[len(chosen) :]
        share = -(-left // len(chosen))
        limited = [Part(*part[:3], taken[part.number] + share) for part in chosen]
        yield limited
        for part in limited:
            taken[part.number], ended = _taken(finished(job, part.number), part.limit or 0)
            stopped = [x for x in stopped if x.number != part.number] + ([] if ended else [part])


def is_done(job: Job, part: Part) -> bool:
    """Return whether a part has ended or reached its limit."""
    records = finished(job, part.number)
    ended = bool(records) and records[-1].last
    return ended or (part.limit is not None and training_tokens(records) >= part.limit)


def _taken(records: list[Finished], limit: int) -> tuple[int, bool]:
    """Return the training tokens of a part when it reached `limit`, and whether it ended before.

    Records that a later list added do not count: an interrupted preparation repeats all lists.
    """
    for count in range(1, len(records) + 1):
        tokens = training_tokens(records[:count])
        if tokens >= limit or records[count - 1].last:
            return tokens, records[count - 1].last
    raise AssertionError("the part was not tokenised up to its limit")
