"""Suites of tasks that papers report, and the metric that each paper prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kalmix.errors import ArgumentError, unknown_name
from kalmix.validation import check_positive_int

PERPLEXITY = "perplexity"
RULER_LENGTHS = tuple(2**n for n in range(12, 18))  # tokens, 4K to 128K
MAX_LENGTH = 2**20  # tokens; lm-eval cuts longer contexts
PERPLEXITY_LENGTHS = tuple(2**n for n in range(11, 18))  # tokens, 2K to 128K


class Column(NamedTuple):
    """Column of a table of scores.

    Attributes:
        task: name of the task in lm-eval, or "perplexity".
        metric: metric that the paper prints; empty for tasks that have one metric for each length.
        title: heading of the column.
    """

    task: str
    metric: str
    title: str


class Suite(NamedTuple):
    """Tasks of a paper.

    Attributes:
        title: text that names the suite in tables.
        columns: tasks, in the order of the paper's table.
        by_length: each task is run at several lengths.
    """

    title: str
    columns: tuple[Column, ...]
    by_length: bool = False


class Unit(NamedTuple):
    """Part of an evaluation that is run and stored at once: a task, at one length if it has several."""

    column: Column
    length: int | None = None

    @property
    def key(self) -> str:
        """Name of the unit in the file of results, such as "piqa" or "niah_single_1@4096"."""
        return self.column.task if self.length is None else f"{self.column.task}@{self.length}"


SUITES: dict[str, Suite] = {
    # Kalman Linear Attention, Table 4 and appendix G.6: acc_norm for HellaSwag and ARC-Challenge, acc for all others.
    "kla": Suite(
        "Zero-shot tasks of Kalman Linear Attention (accuracy in %)",
        (
            Column("lambada_openai", "acc", "LAMB."),
            Column("hellaswag", "acc_norm", "HellaS."),
            Column("piqa", "acc", "PIQA"),
            Column("arc_easy", "acc", "Arc-E"),
            Column("arc_challenge", "acc_norm", "Arc-C"),
            Column("winogrande", "acc", "WinoGr."),
            Column("openbookqa", "acc", "OBQA"),
            Column("boolq", "acc", "BoolQ"),
        ),
    ),
    # Gated KalmaNet, Tables 7, 8 and 11.
    "gka": Suite(
        "LM-Harness tasks of Gated KalmaNet (score in %)",
        (
            Column("arc_challenge", "acc_norm", "ARC-C"),
            Column("arc_easy", "acc_norm", "ARC-E"),
            Column("boolq", "acc", "BoolQ"),
            Column("copa", "acc", "COPA"),
            Column("hellaswag", "acc_norm", "HellaSWAG"),
            Column("piqa", "acc_norm", "PIQA"),
            Column("sciq", "acc_norm", "SciQ"),
            Column("winogrande", "acc", "Winogrande"),
            Column("fda", "contains", "FDA"),
            Column("swde", "contains", "SWDE"),
        ),
    ),
    # Gated KalmaNet, appendix F: RULER's tasks of "Synthetic Recall" and "LongQA". Its scores are in charts.
    "long": Suite(
        "RULER by generation, and perplexity by length",
        (
            *(Column(f"niah_single_{n}", "", f"S-NIAH-{n}") for n in (1, 2, 3)),
            *(Column(f"niah_multikey_{n}", "", f"MK-NIAH-{n}") for n in (1, 2, 3)),
            Column("niah_multivalue", "", "MV-NIAH"),
            Column("niah_multiquery", "", "MQ-NIAH"),
            Column("ruler_vt", "", "VT"),
            Column("ruler_cwe", "", "CWE"),
            Column("ruler_fwe", "", "FWE"),
            Column("ruler_qa_squad", "", "SQuAD"),
            Column("ruler_qa_hotpot", "", "HotpotQA"),
            Column(PERPLEXITY, PERPLEXITY, "perplexity"),
        ),
        by_length=True,
    ),
}


def units_of(
    suite: str, tasks: Sequence[str] = (), lengths: Sequence[int] = (), text_lengths: Sequence[int] | None = None
) -> list[Unit]:
    """Return the units of an evaluation, in order.

    Args:
        suite: name of a suite.
        tasks: names of its tasks to run. Default: all but perplexity.
        lengths: lengths in tokens of the tasks of RULER. Default: 4K to 128K.
        text_lengths: lengths of perplexity, which is then computed besides the tasks. Default: no text.

    Raises:
        ArgumentError: a name is unknown, perplexity is requested without a text, a length is not a positive integer,
            below 2 for a perplexity or too large for lm-eval, or the suite has no lengths.
    """
    if suite not in SUITES:
        raise unknown_name("suite", suite, SUITES)
    found, names = SUITES[suite], [column.task for column in SUITES[suite].columns]
    for task in tasks:
        if task not in names:
            raise unknown_name("tasks", task, names)
    for name, given in (("lengths", bool(lengths)), ("text", text_lengths is not None)):
        if given and not found.by_length:
            raise ArgumentError(name, problem=f"does not apply to the suite {suite!r}", expected="the suite 'long'")
    for length in lengths:
        check_positive_int("lengths", length)
    if text_lengths and min(text_lengths) < 2:
        expected = "at least 2 tokens for a perplexity: the first one of a window is not predicted"
        raise ArgumentError("lengths", got=min(text_lengths), expected=expected)
    if PERPLEXITY in tasks and text_lengths is None:
        raise ArgumentError("text", problem="is missing", expected="a text to compute the perplexity of")
    wanted = set(tasks) or set(names) - {PERPLEXITY}
    if text_lengths is not None:
        wanted.add(PERPLEXITY)
    units: list[Unit] = []
    for column in found.columns:
        of_task = (text_lengths or ()) if column.task == PERPLEXITY else (lengths or RULER_LENGTHS)
        chosen: Sequence[int | None] = of_task if found.by_length else (None,)
        units += [Unit(column, length) for length in chosen if column.task in wanted]
    longest = max((unit.length or 0 for unit in units if unit.column.task != PERPLEXITY), default=0)
    if longest > MAX_LENGTH:
        raise ArgumentError("lengths", got=longest, expected=f"at most {MAX_LENGTH}, except for {PERPLEXITY!r}")
    return units
