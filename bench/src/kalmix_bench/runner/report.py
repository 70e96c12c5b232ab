"""`kalmix bench report`: what all results say together, what papers say beside it: tables, CSV, pictures."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kalmix.errors import ArgumentError
from kalmix.files import replacing
from kalmix_bench.experiments.collision import report as collision_report
from kalmix_bench.experiments.recall import report as benchmark_report
from kalmix_bench.experiments.sde import report as sde_report
from kalmix_bench.experiments.solvers import report as solvers_report
from kalmix_bench.runner import markdown_console as sheet
from kalmix_bench.runner.cells import Results, Row
from kalmix_bench.runner.markdown_console import Sheet
from kalmix_bench.runner.paper_claims import Finding, Seen, seen
from kalmix_bench.runner.summary import printed

COLUMNS = (
    *("task", "asked", "layer", "width", "depth", "seeds", "diverged", "parameters", "state"),
    *("rate", "decay", "epochs"),
)


class Section(NamedTuple):
    """What is reported of one kind of results.

    Attributes:
        name: of the kind.
        names: what every row of it has, and rows of another do not.
        part: by which its rows are told apart first, if not all are of one protocol; then those count that were asked
            as the last of a part was, which `alike` of it says.
        tell: prints tables of rows and draws them; the files drawn.
        findings: the numbers of rows that are listed and compared.
    """

    name: str
    names: frozenset[str]
    part: str | None
    alike: str | None
    tell: Callable[[Sequence[Row], Path, Console], list[Path]]
    findings: Callable[[Sequence[Row]], list[Finding]]

    def of(self, rows: Iterable[Row]) -> list[Row]:
        """Those of its kind; of a part that was asked in several ways, those asked in the last."""
        mine = [row for row in rows if self.names <= row.keys()]
        if self.part is None or self.alike is None:
            return mine
        last = {row[self.part]: row[self.alike] for row in mine}
        return [row for row in mine if row[self.alike] == last[row[self.part]]]


SECTIONS = (
    Section("benchmarks", frozenset(("task", "layer")), None, None, benchmark_report.tell, benchmark_report.findings),
    Section(
        "collision",
        frozenset(("study", "model")),
        "study",
        "protocol",
        collision_report.tell,
        collision_report.findings,
    ),
    Section(
        "solvers", frozenset(("study", "setting")), "study", "setting", solvers_report.tell, solvers_report.findings
    ),
    Section("sde", frozenset(("setting", "model")), "setting", "protocol", sde_report.tell, sde_report.findings),
)


def run(
    folders: Annotated[list[Path], typer.Argument(help="Outputs of `kalmix bench`.")],
    output: Annotated[Path | None, typer.Option(help="For tables and pictures; the first folder if absent.")] = None,
) -> None:
    """What results of benches say: tables (report.md, report.csv) and pictures, papers' figures beside ours."""
    console, rows = Console(highlight=False), []
    for folder in folders:
        results = Results(folder / "results.jsonl")
        if not results.path.exists():
            raise ArgumentError("folders", got=f"{str(folder)!r}, without results.jsonl", needs="outputs of a bench")
        found = list(results.read())
        if not any(section.of(found) for section in SECTIONS):
            got = f"{str(folder)!r}, whose results.jsonl has no finished cell of a bench"
            raise ArgumentError("folders", got=got, needs="outputs of a bench")
        rows += found
    rows = list({_cell(row): row for row in rows}.values())
    for path in write(rows, output or folders[0], console):
        console.print(f"  {path}", soft_wrap=True)


def _cell(row: Row) -> str:
    """What makes a row's cell: a line has that first, and then where it was run, which begins with its seconds."""
    names = list(row)
    return json.dumps({name: row[name] for name in names[: names.index("seconds")]}, sort_keys=True)


def write(rows: Sequence[Row], output: Path, console: Console) -> list[Path]:
    """Print what rows say, and write it; the files written. What papers find better than what stands last on the
    terminal, and first in the file."""
    output.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[Table]] = {"orderings": []}
    findings, drawn = [], []
    for section in SECTIONS:
        mine = section.of(rows)
        if mine:
            told = Sheet(console)
            drawn += section.tell(mine, output, told)
            findings += section.findings(mine)
            parts[section.name] = told.tables
    known = list(seen(findings))
    if known:
        last = Sheet(console)
        last.print(_orderings(known))
        parts["orderings"] = last.tables
    return [sheet.write(parts, output / "report.md"), _csv(findings, output / "report.csv"), *drawn]


def _orderings(known: Iterable[Seen]) -> Table:
    table = Table(
        "better, by the paper",
        box=box.SIMPLE_HEAD,
        title="[bold]what the papers find better, and what was found",
        title_justify="left",
    )
    table.add_column("of")
    for column in ("found", "seeds"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("holds")
    table.add_column("paper")
    table.add_column("at")
    for one in known:
        ordering, seeds = one.ordering, dict.fromkeys((one.ahead.seeds, one.behind.seeds))
        better = f"{ordering.ahead} over {ordering.behind}"
        holds, where = "yes" if one.holds else "no", one.ahead.where
        table.add_row(better, ordering.score, str(one), "/".join(map(str, seeds)), holds, one.paper, where)
    return table


def _csv(findings: Iterable[Finding], path: Path) -> Path:
    """A line a finding."""
    with replacing(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow([*COLUMNS, "score", "mean", "standard error", "paper percent", "source"])
        for found in findings:
            told = {"task": found.task, "asked": found.asked, "layer": found.layer, "seeds": found.seeds, **found.facts}
            paper = printed(found.task, found.layer) if found.facts.get("main") == found.score else None
            lines.writerow([*(told.get(name) for name in COLUMNS), found.score, *found.value, *(paper or ("", ""))])
    return path
