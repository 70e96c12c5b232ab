"""`kalmix list`: names that other commands and configurations accept, one a line with a description."""

from __future__ import annotations

import inspect
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from typing import Annotated

import typer

from kalmix.errors import ArgumentError, any_of

Names = Iterable[tuple[str, str]]
INSTALL_BENCH = "It is on no package index: run `pip install ./bench` in a clone of the kalmix repository."
IN_BENCH = ("tasks", "presets")


def run(
    kind: Annotated[
        str, typer.Argument(help="layers, designs, ops or recipes; with kalmix-bench also tasks, presets.")
    ],
) -> None:
    """List the names of layers, designs, ops or recipes, each with a description."""
    listings = _listings()
    if kind in IN_BENCH and kind not in listings:
        raise ModuleNotFoundError(
            f"`kalmix list {kind}` needs the package kalmix-bench. {INSTALL_BENCH}", name="kalmix_bench"
        )
    if kind not in listings:
        raise ArgumentError("kind", got=repr(kind), expected=any_of([*listings]))
    typer.echo(_table(list(listings[kind]())))


def _listings() -> dict[str, Callable[[], Names]]:
    """Return functions that yield names with descriptions, by kind; other packages add theirs by an entry point."""
    own: dict[str, Callable[[], Names]] = {"layers": layers, "designs": designs, "ops": ops, "recipes": recipes}
    found = {entry.name: entry for entry in entry_points(group="kalmix.commands")}
    others = {name.removeprefix("list-"): entry for name, entry in found.items() if name.startswith("list-")}
    return own | {kind: lambda entry=entry: entry.load()() for kind, entry in others.items()}


def layers() -> Names:
    """Yield each layer's name in a model's configuration and its summary."""
    from kalmix.layers import MIXERS

    for name, layer in MIXERS.items():
        yield name, summary(layer)


def designs() -> Names:
    """Yield each published design's name, assumptions and op."""
    from kalmix.designs import CATALOGUE

    for name, row in CATALOGUE.items():
        yield name, f"{row.transition.description}; {row.evidence.description}; op {row.op}"


def ops() -> Names:
    """Yield each op's name, summary and kernels."""
    from kalmix.ops import OPS

    for name, op in OPS.items():
        kernels = ", ".join(kernel.name for kernel in op.kernels)
        yield name, f"{summary(op.function)} Kernels: {kernels}."


def recipes() -> Names:
    """Yield the name and the description of each recipe of `kalmix pretrain`."""
    from kalmix.training.recipe_files import read_recipe, recipe_names

    for name in recipe_names():
        yield name, read_recipe(name).description


def summary(documented: object) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(documented) or "").partition("\n\n")[0].split())


def _table(rows: list[tuple[str, str]]) -> str:
    """Align names and descriptions; wrap descriptions on a terminal, but not in a pipe."""
    indent = max(len(name) for name, _ in rows) + 2
    columns = shutil.get_terminal_size().columns
    if not sys.stdout.isatty():
        return "\n".join(f"{name:<{indent}}{text}" for name, text in rows)
    if columns < 2 * indent:  # too narrow for two columns
        fold = textwrap.TextWrapper(columns, initial_indent="  ", subsequent_indent="  ", break_long_words=True)
        return "\n".join(f"{name}\n{fold.fill(text)}" for name, text in rows)
    fold = textwrap.TextWrapper(columns, initial_indent=" " * indent, subsequent_indent=" " * indent)
    return "\n".join(f"{name:<{indent}}{fold.fill(text).lstrip()}" for name, text in rows)
