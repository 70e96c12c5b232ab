"""Tables and figures of the benchmarks, next to the scores that papers print."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kalmix_bench.experiments.recall import figures
from kalmix_bench.experiments.recall.published import published_score
from kalmix_bench.experiments.recall.summary import LayerSummary, scores_by_length, slices, summarize
from kalmix_bench.runner.cells import Row
from kalmix_bench.runner.line_panels import LinePanel, draw_line_panels, seed_curve
from kalmix_bench.runner.paper_claims import Finding
from kalmix_bench.runner.published_names import published_name

SIZE_LABELS = {"hidden_size": "hidden size", "depth": "number of blocks"}
KINDS = {"scores": "", "test_chosen_scores": ", chosen on test"}
LAYER_COLUMNS = 24  # smallest width of the column of layers, for names with options


def write_report(rows: Sequence[Row], output: Path, console: Console) -> list[Path]:
    """Print a table per task and draw figures; return the files drawn."""
    summaries = summarize(rows)
    for _, group in groupby(summaries, lambda entry: (entry.task, entry.condition)):
        console.print(_table(list(group)))
    return _pictures([entry for entry in summaries if entry.rows], output)


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Return every score of every layer that did not diverge."""
    results = []
    for entry in (entry for entry in summarize(rows) if entry.rows):
        first = entry.rows[0]
        metadata = {name: getattr(entry, name) for name in ("hidden_size", "depth", "diverged", "main_score")}
        metadata |= {name: first[name] for name in ("parameters", "state")}
        metadata |= {name: first["protocol"][name] for name in ("learning_rate", "weight_decay")}
        metadata |= {"epochs": entry.mean_of("epochs"), "validation": first["protocol"].get("validation", 0)}
        for kind in (kind for kind in KINDS if kind in first):
            for name in first["scores"]:
                score = entry.score(name, kind)
                assert score is not None
                called = name + KINDS[kind]
                paper = published_score(entry.task, entry.layer) if called == entry.main_score else None
                place = (entry.task, entry.condition, entry.layer)
                results.append(Finding(*place, called, score, len(entry.rows), metadata, paper))
    return results


def _table(summaries: Sequence[LayerSummary]) -> Table:
    """Return the table of one task: a row per layer, hidden size and depth."""
    sound = [entry for entry in summaries if entry.rows]
    scores = list(sound[0].rows[0]["scores"]) if sound else []
    scores = [name for name in scores if name != "test_loss"]
    score_kinds = [(name, "scores") for name in scores]
    score_kinds += [
        (sound[0].main_score, kind) for kind in KINDS if kind != "scores" and sound and kind in sound[0].rows[0]
    ]
    titled = f"[bold]{summaries[0].task}[/]  {summaries[0].condition}"
    table = Table(box=box.SIMPLE_HEAD, title=titled, title_justify="left")
    longest = max(len(entry.layer) for entry in summaries)
    table.add_column("layer", min_width=min(longest, LAYER_COLUMNS), overflow="fold")
    headings = (
        "size",
        "parameters",
        "state",
        "seeds",
        *(f"{name} %{KINDS[kind]}" for name, kind in score_kinds),
        "paper %",
    )
    for column in (*headings, "learning rate", "weight decay", "epochs", "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    sources = {}
    for entry in summaries:
        paper = published_score(entry.task, entry.layer)
        if paper is not None:
            sources[paper.source] = None
        paper_score, size = "" if paper is None else f"{paper.percent:g}", f"{entry.hidden_size} x {entry.depth}"
        if not entry.rows:
            table.add_row(escape(entry.layer), size, "", "", "0", *("diverged",) * len(score_kinds), paper_score)
            continue
        first = entry.rows[0]
        table.add_row(
            escape(entry.layer),
            size,
            f"{first['parameters']:,}",
            "grows" if first["state"] is None else f"{first['state']:,}",
            str(len(entry.rows)) + (f" of {len(entry.rows) + entry.diverged}" if entry.diverged else ""),
            *(str(entry.score(name, kind)) for name, kind in score_kinds),
            paper_score,
            f"{first['protocol']['learning_rate']:.2g}",
            f"{first['protocol']['weight_decay']:g}",
            f"{entry.mean_of('epochs'):.0f}",
            f"{entry.seconds:.0f}",
        )
    if sources:
        table.caption = "paper: " + "; ".join(sources)
    return table


def _pictures(summaries: Sequence[LayerSummary], output: Path) -> list[Path]:
    """Draw learning curves of each task, and scores by hidden size, depth, length and load where these vary."""
    by_task = [(place, list(group)) for place, group in groupby(summaries, lambda entry: (entry.task, entry.condition))]
    curves, words, maps = [], [], {}
    sizes: dict[str, list[LinePanel]] = {"hidden_size": [], "depth": []}
    for (task, condition), group in by_task:
        main = group[0].main_score
        y_label = f"{'macro accuracy' if main == 'macro' else main.replace('_', ' ')} (%)"
        levels = {
            published_name(entry.layer): _level(entry)
            for entry in group
            if published_score(entry.task, entry.layer) is not None
        }
        curves.append(LinePanel(task, condition, "epoch", y_label, _by_epoch(group, main, 100), levels))
        curves.append(LinePanel(task, condition, "epoch", "test loss (nats)", _by_epoch(group, "test_loss")))
        for size, values in sizes.items():
            if len({getattr(entry, size) for entry in group}) > 1:
                values.append(LinePanel(task, condition, SIZE_LABELS[size], y_label, _by_size(group, size), log_x=True))
        lengths = _by_length(group)
        if lengths:
            words.append(LinePanel(task, condition, "elements", y_label, lengths))
        for entry in group:
            by, found_at = slices(entry)
            if len(found_at) > 1:
                label = f"{task.rpartition('/')[2]}\n{_name_with_size(entry, group)}"
                maps[label] = figures.HeatMap(by, {at: 100 * score for at, score in found_at.items()})
    files = []
    panelled = (
        ("learning", curves, 4),
        ("widths", sizes["hidden_size"], 3),
        ("depths", sizes["depth"], 3),
        ("words", words, 3),
    )
    for name, panels, columns in panelled:
        if panels:
            files.append(Path(draw_line_panels(output / f"{name}.png", panels, columns)))
    if maps:
        files.append(Path(figures.heat_maps(output / "lengths.png", maps, y_label="length (tokens)")))
    return files


def _name_with_size(entry: LayerSummary, group: Sequence[LayerSummary]) -> str:
    """Return the layer's name, with its size if the group has several."""
    several = len({(other.hidden_size, other.depth) for other in group}) > 1
    name = published_name(entry.layer)
    return f"{name}, {entry.hidden_size} x {entry.depth}" if several else name


def _level(entry: LayerSummary) -> float:
    paper = published_score(entry.task, entry.layer)
    return float("nan") if paper is None else paper.percent


def _by_epoch(group: Sequence[LayerSummary], name: str, times: float = 1) -> dict[str, Any]:
    """Return means over seeds, multiplied by `times`, up to the epoch that all seeds reached."""
    return {
        _name_with_size(entry, group): seed_curve([row["curves"][name] for row in entry.rows], times) for entry in group
    }


def _by_size(group: Sequence[LayerSummary], size: str) -> dict[str, Any]:
    """Return scores by "hidden_size" or "depth": a curve for each layer, and for each value of the other one."""
    other = "depth" if size == "hidden_size" else "hidden_size"
    several = len({getattr(entry, other) for entry in group}) > 1
    points: dict[str, list[tuple[Any, ...]]] = {}
    for entry in sorted(group, key=lambda entry: getattr(entry, size)):
        score = entry.score(entry.main_score)
        if score is not None:
            name = published_name(entry.layer)
            name = f"{name}, {SIZE_LABELS[other]} {getattr(entry, other)}" if several else name
            points.setdefault(name, []).append((getattr(entry, size), *(100 * x for x in score)))
    return {name: tuple(list(column) for column in zip(*at, strict=True)) for name, at in points.items()}


def _by_length(group: Sequence[LayerSummary]) -> dict[str, Any]:
    """Return scores of a word problem by number of elements: a curve for each layer that was tested on several."""
    curves = {}
    for entry in group:
        found = scores_by_length(entry)
        if len(found) > 1:
            points = [(length, *(100 * x for x in score)) for length, score in found.items()]
            curves[_name_with_size(entry, group)] = tuple(list(column) for column in zip(*points, strict=True))
    return curves
