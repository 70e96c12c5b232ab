"""Status of a table or figure, computed by comparing what its paper prints with committed results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kalmix_bench.datasets import TASKS
from kalmix_bench.experiments.recall.published import published_scores
from kalmix_bench.papers.entries import Blocks, Entry, Order, PrintedNumber, PrintedScores
from kalmix_bench.papers.quantities import CommittedResults, Measured, Sizes
from kalmix_bench.papers.word_problems import accuracies, count_blocks
from kalmix_bench.runner.published_names import published_name

LEARNED = 0.5  # smallest share that shows that a layer has learned a task; layers that have not do not match
EQUAL_SHARES = 0.0005  # largest difference of fractions that match: half of the last digit of 99.9%
APPROXIMATE = 2.5  # largest difference from a number that the paper prints as approximate, in percent points
REPRODUCED, CONFIRMED, DIFFERS = "reproduced", "order confirmed", "differs"
PICTURE, NOT_RUN, NO_EXPERIMENT = "picture drawn", "not run", "not an experiment"
MEANINGS = {
    REPRODUCED: "each printed number with a result here is within one standard error of ours, or equals ours, rounded; "
    f"numbers printed as approximate are within {APPROXIMATE} points",
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
        agrees: whether they agree; `None` if there is no result, or if the results decide nothing.
        is_order: whether it is an order.
        distance: difference between both sides in percent of the second; 0 for limits.
        seeds: number of seeds of our result; 0 if it has none.
        layer, task: layer and task of a printed score, in words.
        on_validation: whether our result also agrees if validation rows choose the epoch; `None` without such rows.
        files: files that hold our results.
        is_unlearned: whether neither layer has learned the task, so that the results decide nothing.
    """

    what: str
    text: str
    agrees: bool | None
    is_order: bool = False
    distance: float = 0.0
    seeds: int = 0
    layer: str = ""
    task: str = ""
    on_validation: bool | None = None
    files: tuple[str, ...] = ()
    is_unlearned: bool = False


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
        ours = results.look_up(number.ours)
        yield _name_files(_compare_number(number, ours), ours)
    for blocks in entry.blocks:
        yield from _compare_blocks(blocks, results)
    for order in entry.orders:
        pair = results.look_up_pair(order.better, order.worse)
        yield _name_files(_compare_order(order, *pair), *pair)


def _name_files(comparison: Comparison, *results: Measured | None) -> Comparison:
    """Return the comparison with the files of the results."""
    return comparison._replace(files=tuple(one.file for one in results if one is not None))


def _compare_scores(scores: PrintedScores, results: CommittedResults) -> Iterator[Comparison]:
    for layer, task, percent in published_scores(scores.source):
        if scores.layers and layer not in scores.layers:
            continue
        names = published_name(layer), task.rpartition("/")[2].replace("-", " ")
        number = PrintedNumber(f"{', '.join(names)} (%)", {}, f"{percent:.{scores.decimals}f}", percent=True)
        ours = read_score(results, scores.file, task, layer, scores.sizes, "test")
        compared = _name_files(_compare_number(number, ours), ours)
        held_out = read_score(results, scores.file, task, layer, scores.sizes, "validation")
        agrees = None if held_out is None else _compare_number(number, held_out).agrees
        yield compared._replace(layer=names[0], task=names[1], on_validation=agrees)


def read_score(
    results: CommittedResults, files: Sequence[str], task: str, layer: str, sizes: Mapping[str, Any], chosen_on: str
) -> Measured | None:
    """Return the main score of a layer on a task, of the epoch that "test" or "validation" rows choose."""
    allowed: Sizes = {**sizes, "chosen_on": chosen_on}  # pyright: ignore[reportAssignmentType]
    return results.find(files, task, layer, next(iter(TASKS[task].scores)), **allowed)


def _compare_blocks(blocks: Blocks, results: CommittedResults) -> Iterator[Comparison]:
    sizes: Any = blocks.sizes
    by_layer = {
        layer: accuracies(results, [blocks.file], blocks.task, layer, sizes)
        for layer in (blocks.layer, *blocks.fewer_than)
    }
    name, limit = published_name(blocks.layer), f"claimed at most {blocks.at_most}"
    for length in blocks.lengths:
        ours = count_blocks(by_layer[blocks.layer], length)
        what = f"blocks of {name}, length {length}"
        if ours is None:
            yield Comparison(what, limit, None)
        else:
            agrees, files = ours.is_at_most(blocks.at_most), (blocks.file,)
            yield Comparison(what, f"{ours}, {limit}", agrees, seeds=ours.seeds, files=files)
    last = blocks.lengths[-1]
    ours = count_blocks(by_layer[blocks.layer], last)
    for layer in blocks.fewer_than:
        theirs, other = count_blocks(by_layer[layer], last), published_name(layer)
        what = f"blocks at length {last}"
        if ours is None or theirs is None:
            yield Comparison(what, f"{name} needs fewer than {other}", None, True)
            continue
        agrees, seeds = ours.is_below(theirs), min(ours.seeds, theirs.seeds)
        sign = "<" if agrees else "not <"
        text = f"{ours} ({name}) {sign} {theirs} ({other})"
        yield Comparison(what, text, agrees, True, seeds=seeds, files=(blocks.file,))


def _compare_number(number: PrintedNumber, ours: Measured | None) -> Comparison:
    limit = number.printed or number.above or number.below
    kinds = (("printed about ", number.about), ("printed ", number.printed), ("claimed above ", number.above))
    theirs = next((text for text, holds in kinds if holds), "claimed below ")
    if ours is None:
        return Comparison(number.what, theirs + limit, None)
    if not ours.seeds and ours.diverged:
        return Comparison(number.what, f"diverged, {theirs}{limit}", False, distance=math.inf)
    factor = 100 if number.percent else 1
    value, error, bound = factor * ours.value, factor * ours.error, float(limit)
    if number.printed:
        agrees, shown = agree(value, error, limit, APPROXIMATE if number.about else 0.0), _format(value, limit)
        distance = _difference(value, bound)
    else:
        agrees, shown, distance = (value > bound if number.above else value < bound), f"{value:.4g}", 0.0
    uncertainty = _uncertainty(ours, factor)
    return Comparison(number.what, f"{shown}{uncertainty}, {theirs}{limit}", agrees, False, distance, ours.seeds)


def _uncertainty(ours: Measured, factor: float) -> str:
    """Return a standard error and diverged seeds as text; empty if there are none."""
    error = f" ± {factor * ours.error:.2g}" if ours.seeds > 1 else ""
    return error + (f" ({ours.diverged} of {ours.seeds + ours.diverged} seeds diverged)" if ours.diverged else "")


def agree(value: float, error: float, printed: str, about: float = 0.0) -> bool:
    """Return whether a number is within its standard error of a printed one, or equals it when rounded.

    Args:
        value, error: our number and its standard error; NaN if it has none.
        printed: the paper's number, with its decimals.
        about: a difference that agrees in any case.
    """
    half_unit = 0.5 * 10.0 ** -_decimals(printed)
    return abs(value - float(printed)) <= max(half_unit * (1 + 1e-9), 0.0 if error != error else error, about)


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
    pair = (better, worse)
    if math.isnan(better.value) or math.isnan(worse.value):
        texts = [
            f"{name} {'diverged' if math.isnan(one.value) else 'did not'}"
            for one, name in zip(pair, names, strict=True)
        ]
        return Comparison(order.what, ", ".join(texts), not math.isnan(better.value), True, math.inf)
    if order.matches and max(better.value, worse.value) < LEARNED:
        text = f"neither {names[0]} nor {names[1]} has learned the task"
        return Comparison(order.what, text, None, True, is_unlearned=True)
    agrees = better.value < worse.value if order.lower_is_better else better.value > worse.value
    sign = "=" if better.value == worse.value else "<" if better.value < worse.value else ">"
    if order.matches and abs(better.value - worse.value) <= _margin(order, better, worse):
        agrees, sign = True, "≈"
    factor = 100 if order.percent else 1
    values = [factor * one.value for one in pair]
    digits = next((count for count in (3, 4, 5, 6) if f"{values[0]:.{count}g}" != f"{values[1]:.{count}g}"), 8)
    shown = [
        f"{value:.{digits}g}{_uncertainty(one, factor)} ({name})"
        for value, one, name in zip(values, pair, names, strict=True)
    ]
    text = f"{shown[0]} {sign} {shown[1]}"
    seeds = min((one.seeds for one in pair if one.seeds), default=0)
    return Comparison(order.what, text, agrees, True, _difference(better.value, worse.value), seeds)


def _margin(order: Order, better: Measured, worse: Measured) -> float:
    """Return the largest difference between numbers that match: its standard error, or one that rounding hides."""
    errors = [0.0 if math.isnan(one.error) else one.error for one in (better, worse)]
    return max(math.hypot(*errors), EQUAL_SHARES if order.percent else 0.0)


def _difference(value: float, other: float) -> float:
    """Return a difference in percent of the second number."""
    return 100 * abs(value - other) / max(abs(other), 1e-12)
