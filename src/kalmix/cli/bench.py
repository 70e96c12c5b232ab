"""`kalmix bench`: the experiments and benchmarks of the papers, one a command; and what their results say together."""

from __future__ import annotations

import typer

from kalmix.cli import bench_beliefs, benchmark, collision, sde, solvers
from kalmix.training.bench.presets import BENCHES

app = typer.Typer(name="bench", help="The experiments of the papers, one a command.", no_args_is_help=True)
for name in BENCHES:
    app.command(name=name)(benchmark.command(name))
app.command(name="collision")(collision.run)
app.command(name="sde")(sde.run)
app.command(name="solvers")(solvers.run)
app.command(name="report")(benchmark.report_on)
app.command(name="beliefs")(bench_beliefs.run)


@app.callback()
def _group() -> None:
    """A group."""
