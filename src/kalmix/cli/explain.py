"""`kalmix explain`: what a design assumes."""

from __future__ import annotations

from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from kalmix.designs import CATALOGUE, Design
from kalmix.errors import ArgumentError


def run(
    design: Annotated[str | None, typer.Argument(help="A published design; all of them if absent.")] = None,
) -> None:
    """What a design assumes: transition, evidence, covariance; the op that filters it; its source."""
    console = Console(highlight=False)
    if design is None:
        console.print(_catalogue())
        return
    names = {_plain(name): row for name, row in CATALOGUE.items()}
    if _plain(design) not in names:
        raise ArgumentError("design", got=repr(design), expected=f"one of {', '.join(sorted(CATALOGUE))}")
    console.print(_card(names[_plain(design)]))


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def _catalogue() -> Table:
    said = [Column(name, overflow="fold") for name in ("transition", "evidence", "covariance", "op")]
    table = Table(Column("design", no_wrap=True), *said, box=box.SIMPLE_HEAD)  # a name is typed again: never cut
    for row in CATALOGUE.values():
        table.add_row(row.name, row.transition.description, _evidence(row), row.covariance.kind, row.op)
    return table


def _evidence(design: Design) -> str:
    return design.evidence.kind + ", by column" * design.evidence.columns


def _card(design: Design) -> Table:
    table = Table(box=box.SIMPLE, show_header=False, title=f"[bold]{design.name}", title_justify="left", pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name in ("transition", "evidence", "covariance"):
        part = getattr(design, name)
        table.add_row(name, f"{part.description}\n{_formula(part.statement)}")
    table.add_row("update", _formula(design.update))
    table.add_row("op", f"kalmix.ops.{design.op}")
    optional = (f"{name} (optional)" for name in design.optional)
    table.add_row("signals", ", ".join(("q", "k", "v", *design.signals, *optional)))
    if design.options:
        table.add_row("options", ", ".join(design.options))
    table.add_row("equations", design.equations)
    table.add_row("citation", design.citation)
    return table


def _formula(statements: str) -> str:
    """One statement a line."""
    return "\n".join(f"[cyan]{escape(line)}[/]" for line in statements.replace(";  ", ",  ").split(",  "))
