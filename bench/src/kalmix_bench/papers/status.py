"""Status of a table or figure, computed by comparing what its paper prints with committed results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kalmix_bench.datasets import TASKS
from kalmix_bench.experiments.recall.published import published_scores
from kalmix_bench.papers.entries import Entry, Order, PrintedNumber, PrintedScores
from kalmix_bench.papers.quantities import CommittedResults, Measured
from kalmix_bench.runner.published_names import published_name

REPRODUCED, CONFIRMED, DIFFERS = "reproduced", "order confirmed", "differs"
PICTURE, NOT_RUN, NO_EXPERIMENT = "picture drawn", "not run", "not an experiment"
MEANINGS = {
    REPRODUCED: "each printed number with a result here is within one standard error of ours, or equals ours, rounded",
    CONFIRMED: "each ranking that the paper states holds here, by any difference; no number was compared",
    DIFFERS: "at least one number or ranking does not agree; the line says why, as far as we know",
    PICTURE: "a picture without numbers, drawn here from our own models; compare by eye",
    NOT_RUN: "no result here; the line says why",
    NO_EXPERIMENT: "a drawing, equations or settings; tests are named where they check it",
}


class Comparison(NamedTuple):
    """Printed number, or order, next to our results.

    Attributes:
        what: name of the compared numbers.
        text: both sides as text.
        agrees: whether they agree; `None` if there is no result.
        is_order: whether it is an order.
        distance: difference between both sides in percent of the second; 0 for limits.
        seeds: number of seeds of our result; 0 if it has none.
    """

    what: str
    text: str
    agrees: bool | None
    is_order: bool = False
    distance: float = 0.0
    seeds: int = 0


class Outcome(NamedTuple):
    """Status of an entry and its comparisons.

    Attributes:
        status: one of `MEANINGS`.
        qualifier: "", "in part" or "in small", or both.
        comparisons: all comparisons, those without results included.
    """

    status: str
    qualifier: str
    comparisons: tuple[Comparison, ...]

    @property
    def has_gaps(self) -> bool:
        """Whether results are missing."""
        return self.status == NOT_RUN or "in part" in self.qualifier or any(x.agrees is None for x in self.comparisons)


def outcome(entry: Entry, results: CommittedResults) -> Outcome:
    """Compare an entry with committed results and return its status."""
    if entry.no_experiment:
        return Outcome(NO_EXPERIMENT, "", ())
    comparisons = tuple(compare(entry, results))
    found = [one for one in comparisons if one.agrees is not None]
    if found:
        agree = all(one.agrees for one in found)
        status = (CONFIRMED if all(one.is_order for one in found) else REPRODUCED) if agree else DIFFERS
    else:
        status = PICTURE if entry.pictures else NOT_RUN
    in_part = status in (REPRODUCED, CONFIRMED) and (entry.in_part or len(found) < len(comparisons))
    in_small = entry.small and status != NOT_RUN
    qualifiers = [text for text, holds in (("in part", in_part), ("in small", in_small)) if holds]
    return Outcome(status, ", ".join(qualifiers), comparisons)


def compare(entry: Entry, results: CommittedResults) -> Iterator[Comparison]:
    """Yield the comparisons of an entry."""
    for scores in entry.scores:
        yield from _compare_scores(scores, results)
    for number in entry.numbers:
        yield _compare_number(number, results.look_up(number.ours))
    for order in entry.orders:
        yield _compare_order(order, results.look_up(order.better), results.look_up(order.worse))


def _compare_scores(scores: PrintedScores, results: CommittedResults) -> Iterator[Comparison]:
    for layer, task, percent in published_scores(scores.source):
        if scores.layers and layer not in scores.layers:
            continue
        what = f"{published_name(layer)}, {task.rpartition('/')[2].replace('-', ' ')} (%)"
        ours = results.find(scores.file, task, layer, next(iter(TASKS[task].scores)))
        number = PrintedNumber(what, {}, f"{percent:.{scores.decimals}f}", percent=True)
        yield _compare_number(number, ours)


def _compare_number(number: PrintedNumber, ours: Measured | None) -> Comparison:
    limit = number.printed or number.above or number.below
    theirs = "printed " if number.printed else "claimed above " if number.above else "claimed below "
    if ours is None:
        return Comparison(number.what, theirs + limit, None)
    factor = 100 if number.percent else 1
    value, error, bound = factor * ours.value, factor * ours.error, float(limit)
    if number.printed:
        agrees, shown = agree(value, error, limit), _format(value, limit)
        distance = _difference(value, bound)
    else:
        agrees, shown, distance = (value > bound if number.above else value < bound), f"{value:.4g}", 0.0
    uncertainty = f" ± {error:.2g}" if ours.seeds > 1 else ""
    return Comparison(number.what, f"{shown}{uncertainty}, {theirs}{limit}", agrees, False, distance, ours.seeds)


def agree(value: float, error: float, printed: str) -> bool:
    """Return whether a number is within its standard error of a printed one, or equals it when rounded.

    Args:
        value, error: our number and its standard error; NaN if it has none.
        printed: the paper's number, with its decimals.
    """
    half_unit = 0.5 * 10.0 ** -_decimals(printed)
    return abs(value - float(printed)) <= max(half_unit * (1 + 1e-9), 0.0 if error != error else error)


def _decimals(printed: str) -> int:
    """Return the decimals of a printed number: 2 for "0.50", 6 for "1e-6"."""
    mantissa, _, exponent = printed.partition("e")
    return len(mantissa.partition(".")[2]) - int(exponent or 0)


def _format(value: float, printed: str) -> str:
    """Return a number with the decimals of a printed one, or with three digits if these show too little of it."""
    shown = f"{value:.{max(0, _decimals(printed))}f}"
    return shown if len(shown.strip("-0.")) > 1 or float(shown) == value else f"{value:.3g}"


def _compare_order(order: Order, better: Measured | None, worse: Measured | None) -> Comparison:
    names = [place.get("name") or published_name(place["layer"]) for place in (order.better, order.worse)]
    if better is None or worse is None:
        return Comparison(order.what, f"{names[0]} better than {names[1]}", None, True)
    agrees = better.value < worse.value if order.lower_is_better else better.value > worse.value
    sign = "=" if better.value == worse.value else "<" if better.value < worse.value else ">"
    pair = [100 * one.value if order.percent else one.value for one in (better, worse)]
    digits = next((count for count in (3, 4, 5, 6) if f"{pair[0]:.{count}g}" != f"{pair[1]:.{count}g}"), 8)
    shown = [f"{value:.{digits}g} ({name})" for value, name in zip(pair, names, strict=True)]
    text = f"{shown[0]} {sign} {shown[1]}"
    seeds = min((one.seeds for one in (better, worse) if one.seeds), default=0)
    return Comparison(order.what, text, agrees, True, _difference(better.value, worse.value), seeds)


def _difference(value: float, other: float) -> float:
    """Return a difference in percent of the second number."""
    return 100 * abs(value - other) / max(abs(other), 1e-12)
