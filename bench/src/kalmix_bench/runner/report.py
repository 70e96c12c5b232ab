"""Report of results of one or more experiments next to the papers' figures: tables, CSV and figures."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kalmix.errors import ArgumentError
from kalmix.files import replace_file
from kalmix_bench.runner import markdown_console
from kalmix_bench.runner.cells import Results, Row
from kalmix_bench.runner.experiment import Experiment
from kalmix_bench.runner.markdown_console import RecordingConsole
from kalmix_bench.runner.paper_claims import ClaimCheck, Finding, check_claims

COLUMNS = (
    *("task", "condition", "layer", "hidden_size", "depth", "seeds", "diverged", "parameters", "state"),
    *("learning_rate", "weight_decay", "epochs"),
)


def read(folders: Sequence[Path], experiments: Sequence[Experiment[Any]]) -> list[Row]:
    """Return the rows of all folders; of several rows of one cell, the last.

    Raises:
        ArgumentError: a folder has no results, or none of these experiments.
    """
    rows: list[Row] = []
    for folder in folders:
        results = Results(folder / "results.jsonl")
        if not results.path.exists():
            raise _not_an_output(f"{str(folder)!r}, which has no results.jsonl")
        folder_rows = list(results.read())
        if not any(experiment.select(folder_rows) for experiment in experiments):
            raise _not_an_output(f"{str(folder)!r}, whose results.jsonl has no finished cell")
        rows += folder_rows
    return latest_rows(rows)


def latest_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the last row of each cell."""
    return list({_row_key(row): row for row in rows}.values())


def _not_an_output(folder: str) -> ArgumentError:
    return ArgumentError("folders", problem=f"contains {folder}", expected="output folders of `kalmix bench` commands")


def _row_key(row: Row) -> str:
    """Return the part of a row that defines its cell: all keys before "seconds"."""
    names = list(row)
    return json.dumps({name: row[name] for name in names[: names.index("seconds")]}, sort_keys=True)


def write(rows: Sequence[Row], output: Path, console: Console, experiments: Sequence[Experiment[Any]]) -> list[Path]:
    """Print tables of rows, write report.md, report.csv and figures; return the paths of the files written.

    Claims of papers come last on the terminal and first in the file.
    """
    output.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[Table]] = {"paper claims": []}
    findings, figures = [], []
    for experiment in experiments:
        selection = experiment.select(rows)
        if selection:
            recorder = RecordingConsole(console)
            figures += experiment.report(selection, output, recorder)
            findings += experiment.findings(selection)
            parts[experiment.name] = recorder.tables
    known = list(check_claims(findings))
    if known:
        last = RecordingConsole(console)
        last.print(_claims_table(known))
        parts["paper claims"] = last.tables
    return [markdown_console.write(parts, output / "report.md"), _csv(findings, output / "report.csv"), *figures]


def _claims_table(known: Iterable[ClaimCheck]) -> Table:
    table = Table(
        "claim",
        box=box.SIMPLE_HEAD,
        title="[bold]claims of the papers, and our results",
        title_justify="left",
    )
    table.add_column("score")
    for column in ("ours", "seeds"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("confirmed")
    table.add_column("paper")
    table.add_column("task")
    for one in known:
        claim, seeds = one.claim, dict.fromkeys((one.better.seeds, one.worse.seeds))
        better = f"{claim.better} over {claim.worse}"
        confirmed, label = "yes" if one.is_confirmed else "no", one.better.label
        table.add_row(better, claim.score, str(one), "/".join(map(str, seeds)), confirmed, one.paper, label)
    return table


def _csv(findings: Iterable[Finding], path: Path) -> Path:
    """Write one line per finding."""
    with replace_file(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow([*COLUMNS, "score", "mean", "standard error", "paper percent", "source"])
        for finding in findings:
            cells = {
                "task": finding.task,
                "condition": finding.condition,
                "layer": finding.layer,
                "seeds": finding.seeds,
                **finding.metadata,
            }
            paper = finding.paper or ("", "")
            lines.writerow([*(cells.get(name) for name in COLUMNS), finding.score, *finding.value, *paper])
    return path
