"""`kalmix bench`: the experiments of the papers, one a command."""

from __future__ import annotations

import typer

from kalmix.cli import bench_beliefs, collision, sde, solvers

app = typer.Typer(name="bench", help="The experiments of the papers, one a command.", no_args_is_help=True)
app.command(name="collision")(collision.run)
app.command(name="sde")(sde.run)
app.command(name="solvers")(solvers.run)
app.command(name="beliefs")(bench_beliefs.run)


@app.callback()
def _group() -> None:
    """A group."""
