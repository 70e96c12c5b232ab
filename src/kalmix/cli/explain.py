"""`kalmix explain`: the model, equations and source of a design, a layer or an op."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Column, Table

from kalmix.cli.list_names import summary
from kalmix.designs import CATALOGUE, Design
from kalmix.errors import ArgumentError, nearest_names

if TYPE_CHECKING:
    from torch import nn

    from kalmix.ops import OpSpec

NARROW = 50  # columns
Rows = Iterator[tuple[str, str]]  # label and text, in rich's markup


def run(
    name: Annotated[str | None, typer.Argument(help="A design, layer or op. Default: a table of all designs.")] = None,
) -> None:
    """Print the model that a design, layer or op assumes, its equations, options and source."""
    console = Console(highlight=False)
    if name is None:
        _print_catalogue(console)
        return
    explanations = _explanations()
    known: dict[str, str] = {}
    for key in explanations:
        known.setdefault(_plain(key), key)
    if _plain(name) not in known:
        near = nearest_names(name.lower(), known.values())
        raise ArgumentError("name", got=repr(name), expected=f"a design, layer or op, such as {near}")
    key = known[_plain(name)]
    _print_card(console, key, explanations[key]())


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _explanations() -> dict[str, Callable[[], Rows]]:
    """Return functions that yield the rows to print, by name.

    A layer has two names: its class's and that of a model's configuration.
    """
    from torch.nn import Module

    from kalmix import layers
    from kalmix.ops import OPS

    exported = [getattr(layers, name) for name in layers.__all__ if name != "Mixer"]
    classes = {x.__name__: x for x in exported if inspect.isclass(x) and issubclass(x, Module)}
    rows: dict[str, Callable[[], Rows]] = {}
    rows |= {name: lambda design=design: _design(design) for name, design in CATALOGUE.items()}
    rows |= {name: lambda op=op: _op(op) for name, op in OPS.items()}
    return rows | {name: lambda layer=layer: _layer(layer) for name, layer in (layers.MIXERS | classes).items()}


def _print_card(console: Console, title: str, rows: Rows) -> None:
    """Print labels beside texts, or above them on a narrow terminal."""
    if console.width < NARROW:
        console.print(f"[bold]{title}[/]")
        for label, text in rows:
            console.print(f"[dim]{label}[/]")
            console.print(Padding(text, (0, 0, 0, 2)))
        return
    card = Table(box=box.SIMPLE, show_header=False, title=f"[bold]{title}", title_justify="left", pad_edge=False)
    card.add_column(style="dim", no_wrap=True)
    card.add_column()
    for label, text in rows:
        card.add_row(label, text)
    console.print(card)


def _print_catalogue(console: Console) -> None:
    """Print a row per design, or a paragraph on a narrow terminal."""
    rows = {
        row.name: (
            row.transition.description,
            row.evidence.kind + ", by column" * row.evidence.columns,
            row.covariance.kind,
            row.op,
        )
        for row in CATALOGUE.values()
    }
    names = ("transition", "evidence", "covariance", "op")
    if console.width < NARROW:
        for design, facts in rows.items():
            console.print(f"[bold]{design}[/]")
            console.print(Padding("\n".join(f"{n}: {x}" for n, x in zip(names, facts, strict=True)), (0, 0, 0, 2)))
        return
    table = Table(
        Column("design", no_wrap=True), *(Column(name, overflow="fold") for name in names), box=box.SIMPLE_HEAD
    )
    for design, facts in rows.items():
        table.add_row(design, *facts)
    console.print(table)


def _layer(layer: type[nn.Module]) -> Rows:
    from kalmix.layers import MIXERS

    names = [name for name, other in MIXERS.items() if other is layer]
    yield "layer", f"kalmix.layers.{layer.__name__}\n{escape(summary(layer))}"
    for name in names:
        yield "in a model", escape(f'layers=["{name}"] or {{"mixer": "{name}", ...}}')
    yield "arguments", escape(_parameters(layer))
    if issubclass(layer, tuple(MIXERS.values())):
        yield "variance", "of its output, by filter(x, variance=True)" if layer.has_posterior else "none"
        if layer.includes_mlp:
            yield "MLP", "has a gate of its own; published without one behind it"
        if isinstance(layer.design, Design):
            yield "design", layer.design.name
            yield from _design(layer.design)


def _op(op: OpSpec) -> Rows:
    from kalmix.layers import MIXERS

    yield "op", f"kalmix.ops.{op.name}\n{escape(summary(op.function))}"
    yield "arguments", escape(_parameters(op.function))
    yield "returns", f"Filtered(mean, variance, belief), belief a {op.belief.__name__}"
    yield "update", _formula(op.algebra.update)
    yield "kernels", ", ".join(kernel.name for kernel in op.kernels)
    yield "designs", ", ".join(name for name, design in CATALOGUE.items() if design.op == op.name)
    designs = {name: layer.design for name, layer in MIXERS.items() if isinstance(layer.design, Design)}
    yield "layers", ", ".join(name for name, design in designs.items() if design.op == op.name)


def _design(design: Design) -> Rows:
    for name in ("transition", "evidence", "covariance"):
        part = getattr(design, name)
        yield name, f"{part.description}\n{_formula(part.statement)}"
    yield "update", _formula(design.update)
    yield "op", f"kalmix.ops.{design.op}"
    optional = (f"{name} (optional)" for name in design.optional)
    yield "signals", ", ".join(("q", "k", "v", *design.signals, *optional))
    if design.options:
        yield "options", ", ".join(design.options)
    yield "equations", design.equations
    yield "citation", design.citation


def _parameters(function: Callable[..., object]) -> str:
    """Return the names and defaults of a function's parameters."""
    every = inspect.signature(function).parameters.values()
    return ", ".join(x.name if x.default is x.empty else f"{x.name}={x.default!r}" for x in every)


def _formula(statements: str) -> str:
    """Put each equation on a line of its own."""
    return "\n".join(f"[cyan]{escape(line)}[/]" for line in statements.replace(";  ", ",  ").split(",  "))
