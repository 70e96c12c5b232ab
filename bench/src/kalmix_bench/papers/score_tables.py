"""Tables of our scores with standard errors and seeds, next to printed ones, as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kalmix_bench.experiments.recall.published import published_scores
from kalmix_bench.papers.entries import ScoreTable
from kalmix_bench.papers.quantities import CommittedResults, Measured
from kalmix_bench.papers.status import agree, read_score
from kalmix_bench.papers.word_problems import accuracies, count_blocks
from kalmix_bench.runner.published_names import published_name
from kalmix_bench.runner.scores import Score

Line = list[str]


def draw_table(table: ScoreTable, results: CommittedResults) -> str:
    """Return a table with its heading; empty if none of its layers has a result."""
    draw: dict[str, Callable[[ScoreTable, CommittedResults], list[Line]]] = {
        "scores": _scores,
        "lengths": _lengths,
        "blocks": _blocks,
    }
    header, *lines = draw[table.kind](table, results) or [[]]
    if not lines:
        return ""
    above, *rows = ["| " + " | ".join(line) + " |" for line in (header, *lines)]
    files = ", ".join(f"`bench/results/{file}`" for file in results.existing(table.file))
    note = f"{table.note} Rows: {files}.".strip()
    return "\n".join([f"### {table.title}\n", f"{note}\n", above, "|" + "---|" * len(header), *rows]) + "\n"


def _scores(table: ScoreTable, results: CommittedResults) -> list[Line]:
    """Return lines with a column per task: per layer our scores by both choices of the epoch, and the printed ones."""
    printed = {(layer, task): percent for source in table.sources for layer, task, percent in published_scores(source)}
    kinds = {"test": "epoch chosen on test rows", "validation": "epoch chosen on validation rows"}
    lines: list[Line] = []
    any_found = False
    for layer in table.layers:
        for chosen_on, label in kinds.items():
            found = [
                read_score(results, table.file, task, layer, _sizes(table, task), chosen_on) for task in table.tasks
            ]
            if any(found):
                any_found = True
                cells = [
                    _cell(one, table, printed.get((layer, task))) for one, task in zip(found, table.tasks, strict=True)
                ]
                lines.append([published_name(layer), label, *cells])
        papers = [printed.get((layer, task)) for task in table.tasks]
        if any(papers):
            lines.append(
                [
                    published_name(layer),
                    "paper",
                    *("" if x is None else f"{x:.{table.printed_decimals}f}" for x in papers),
                ]
            )
    names = [task.rpartition("/")[2].replace("-", " ") for task in table.tasks]
    return [["layer", "", *names], *lines] if any_found else []


def _sizes(table: ScoreTable, task: str) -> dict[str, Any]:
    return {**table.sizes, "condition": table.conditions.get(task, table.sizes.get("condition", ""))}


def _cell(found: Measured | None, table: ScoreTable, printed: float | None = None) -> str:
    """Return a score in percent with its standard error and number of seeds; bold if it agrees with the printed one."""
    if found is None:
        return ""
    if math.isnan(found.value):
        return "diverged"
    value, error, decimals = 100 * found.value, 100 * found.error, table.decimals
    text = f"{value:.{decimals}f}" + ("" if math.isnan(error) else f" ± {error:.{decimals}f}")
    if printed is not None and agree(value, error, f"{printed:.{table.printed_decimals}f}"):
        text = f"**{text}**"
    return f"{text} ({found.seeds})" + (f", {found.diverged} diverged" if found.diverged else "")


def _by_depth(table: ScoreTable, results: CommittedResults) -> Iterator[tuple[str, dict[int, dict[int, list[float]]]]]:
    """Yield accuracies by depth and length of each layer that has results."""
    sizes: Any = table.sizes
    for layer in table.layers:
        found = accuracies(results, table.file, table.tasks[0], layer, sizes)
        if found:
            yield layer, found


def _lengths(table: ScoreTable, results: CommittedResults) -> list[Line]:
    """Return lines with a column per length: accuracies of each layer at each depth."""
    by_layer = dict(_by_depth(table, results))
    lengths = _all_lengths(by_layer.values())
    lines = [["layer", "blocks", *map(str, lengths)]]
    for layer, by_depth in by_layer.items():
        for depth, values in sorted(by_depth.items()):
            scores = [(Score.of(values[n]), len(values[n])) if n in values else None for n in lengths]
            cells = ["" if x is None else _cell(Measured(*x[0], x[1]), table) for x in scores]
            lines.append([published_name(layer), str(depth), *cells])
    return lines


def _blocks(table: ScoreTable, results: CommittedResults) -> list[Line]:
    """Return lines with a column per length: the number of blocks with which each layer solves it."""
    by_layer = dict(_by_depth(table, results))
    lengths = _all_lengths(by_layer.values())
    lines = [["layer", "blocks that ran", *map(str, lengths)]]
    for layer, by_depth in by_layer.items():
        counts = [count_blocks(by_depth, length) for length in lengths]
        depths = ", ".join(map(str, sorted(by_depth)))
        lines.append([published_name(layer), depths, *("" if one is None else str(one) for one in counts)])
    return lines


def _all_lengths(by_depths: Any) -> Sequence[int]:
    return sorted({length for by_depth in by_depths for values in by_depth.values() for length in values})
