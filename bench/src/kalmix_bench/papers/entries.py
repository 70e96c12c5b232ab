"""Tables and figures of the papers, one entry each, read from the TOML files of this folder."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

PAPERS = ("kalman_linear_attention", "memory_by_design", "gated_kalmanet", "adaptive_filter_attention")


@dataclass(frozen=True)
class PrintedNumber:
    """Number that a paper prints, and the place of ours.

    Attributes:
        what: name of the number, in words.
        ours: place of our number (`quantities.py`).
        printed: the number as printed, with its decimals; or `above` or `below`: a limit that it must exceed, or stay
            under.
        about: whether the paper prints it as approximate; `status.APPROXIMATE` is then the largest difference.
        percent: whether our number is a fraction and the paper's is in percent.
    """

    what: str
    ours: Mapping[str, Any]
    printed: str = ""
    above: str = ""
    below: str = ""
    percent: bool = False
    about: bool = False


@dataclass(frozen=True)
class Order:
    """Claim that one number is better than another, or matches it.

    Attributes:
        what: name of the numbers, in words.
        better, worse: places of our numbers; `name` names what is compared.
        lower_is_better: whether the smaller number is better.
        percent: whether both are fractions that are shown in percent.
        matches: whether the claim also holds for equal shares: for a difference within its standard error, or of at
            most 0.05 percent points. Two shares below one half decide nothing: neither layer has learned the task.
    """

    what: str
    better: Mapping[str, Any]
    worse: Mapping[str, Any]
    lower_is_better: bool = False
    percent: bool = False
    matches: bool = False


@dataclass(frozen=True)
class PrintedScores:
    """Accuracies of a source in `experiments/recall/published.toml`, to compare with rows of files.

    Test rows choose the epoch, as in the papers; a second comparison takes the epoch that validation rows choose.

    Attributes:
        file: rows of results, below the folder of results; the first file that has a score counts.
        source: name of the source.
        decimals: digits that the paper prints behind the point.
        layers: layers whose scores are compared; empty: all.
        sizes: what distinguishes the rows from others of their task (`quantities.Sizes`).
    """

    file: tuple[str, ...]
    source: str
    decimals: int
    layers: tuple[str, ...] = ()
    sizes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Blocks:
    """Claims about the number of blocks with which a layer solves word problems of some lengths.

    Attributes:
        file, task, layer, sizes: rows of the layer, at several depths.
        lengths: numbers of elements; for the last one, other layers are compared.
        at_most: largest number of blocks, as the paper claims.
        fewer_than: layers that need more blocks.
    """

    file: str
    task: str
    layer: str
    lengths: tuple[int, ...]
    at_most: int
    fewer_than: tuple[str, ...] = ()
    sizes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoreTable:
    """Table of our scores with standard errors and seeds, below the lines of a paper.

    Attributes:
        title: heading.
        kind: "scores" with a column per task; or, for word problems, "lengths", with accuracies by length, or
            "blocks", with the number of blocks that solve each length.
        file, layers, sizes: rows; layers without results and printed scores are left out.
        tasks: the tasks.
        sources: sources of printed scores in `experiments/recall/published.toml`.
        conditions: by task, the text that the condition of its rows contains, where tasks differ.
        decimals, printed_decimals: digits behind the point of our numbers and of printed ones.
        note: sentence below the heading.
    """

    title: str
    kind: str
    file: tuple[str, ...]
    tasks: tuple[str, ...]
    layers: tuple[str, ...]
    sources: tuple[str, ...] = ()
    sizes: Mapping[str, Any] = field(default_factory=dict)
    conditions: Mapping[str, str] = field(default_factory=dict)
    decimals: int = 1
    printed_decimals: int = 2
    note: str = ""


@dataclass(frozen=True)
class Entry:
    """Table or figure of a paper, or some panels of a figure.

    Attributes:
        of: its names, such as "Table 6", or "Figure 3a" and "Figure 3b".
        subject: its content, in words.
        numbers, orders, scores, blocks: comparisons with our results.
        pictures: pictures without numbers that are drawn here, below docs/results.
        picture_rows: file with the rows of the models that the pictures show.
        page: page of docs/results with details.
        explanation: why our results differ; shown if they do.
        remark: sentence that is always shown.
        not_run: why results, or some of them, are missing; shown if they are. The names of missing layers come before a
            reason that begins with "for".
        seeds: number of seeds that the paper averages; 0 if it does not say.
        in_part: whether the entry shows results for which there is no comparison here.
        small: whether our models or experiments are smaller than the paper's.
        no_experiment: what it is, if it shows no results of an experiment.
        tests: tests of what it states, as "PATH::NAME".
    """

    of: tuple[str, ...]
    subject: str
    numbers: tuple[PrintedNumber, ...] = ()
    orders: tuple[Order, ...] = ()
    scores: tuple[PrintedScores, ...] = ()
    blocks: tuple[Blocks, ...] = ()
    pictures: tuple[str, ...] = ()
    picture_rows: str = ""
    page: str = ""
    explanation: str = ""
    remark: str = ""
    not_run: str = ""
    seeds: int = 0
    in_part: bool = False
    small: bool = False
    no_experiment: str = ""
    tests: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Names of the entry as text: "Figure 3a, 3b"."""
        first, *others = self.of
        kind = first.partition(" ")[0] + " "
        return ", ".join([first, *(name.removeprefix(kind) for name in others)])

    @property
    def files(self) -> list[str]:
        """Files of results that the entry names, in their order."""
        places = [number.ours for number in self.numbers]
        places += [place for order in self.orders for place in (order.better, order.worse)]
        named = [*(score.file for score in self.scores), *(place["file"] for place in places), self.picture_rows]
        named += [blocks.file for blocks in self.blocks]
        return list(dict.fromkeys(name for names in named for name in _tuple(names) if name))


@dataclass(frozen=True)
class Paper:
    """Tables and figures of one paper.

    Attributes:
        title, link: title, and address (may be empty).
        tables, figures: numbers of tables and figures in the paper.
        entries: one or more per table and figure.
        note: remark below the title.
        score_tables: tables of our scores.
    """

    title: str
    link: str
    tables: int
    figures: int
    entries: tuple[Entry, ...] = field(repr=False)
    note: str = ""
    score_tables: tuple[ScoreTable, ...] = field(default=(), repr=False)


def read_papers() -> list[Paper]:
    """Return the papers, each with its entries."""
    return [read_paper((files("kalmix_bench.papers") / f"{name}.toml").read_text(encoding="utf-8")) for name in PAPERS]


def read_paper(text: str) -> Paper:
    """Return the paper that a TOML document describes."""
    values = tomllib.loads(text)
    entries = tuple(_entry(entry) for entry in values.pop("entry"))
    tables = tuple(ScoreTable(**_tuples(table)) for table in values.pop("score_table", ()))
    return Paper(entries=entries, score_tables=tables, **values)


def _entry(values: dict[str, Any]) -> Entry:
    numbers = tuple(PrintedNumber(**one) for each in values.pop("number", ()) for one in _numbers(each))
    orders = tuple(Order(**one) for each in values.pop("order", ()) for one in _orders(each))
    scores = tuple(PrintedScores(**_tuples({**one, "file": _tuple(one["file"])})) for one in values.pop("scores", ()))
    blocks = tuple(Blocks(**_tuples(one)) for one in values.pop("blocks", ()))
    lists = {name: tuple(values.pop(name, ())) for name in ("of", "pictures", "tests")}
    return Entry(numbers=numbers, orders=orders, scores=scores, blocks=blocks, **lists, **values)


def _tuple(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with tuples in place of lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _numbers(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield one number; for a table `printed`, one per key, which replaces "{x}" in all texts."""
    printed = values.get("printed")
    if not isinstance(printed, dict):
        yield values
        return
    for x, number in printed.items():
        yield _fill({**values, "printed": number}, x)


def _orders(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield one order per item of `worse` and of `each`, which replaces "{x}"; places begin with the values `at`."""
    values = dict(values)
    at, worse, each = values.pop("at", {}), values.pop("worse"), values.pop("each", [""])
    for x in each:
        for one in worse:
            yield _fill({**values, "better": {**at, **values["better"]}, "worse": {**at, **one}}, x)


def _fill(value: Any, x: str) -> Any:
    """Replace "{x}" in all texts of nested values."""
    if isinstance(value, str):
        return value.replace("{x}", x)
    if isinstance(value, Mapping):
        return {key: _fill(one, x) for key, one in value.items()}
    if isinstance(value, Sequence):
        return [_fill(one, x) for one in value]
    return value
