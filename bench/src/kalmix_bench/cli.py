"""`kalmix bench`: the experiments and benchmarks of the papers, one a command; and what their results say together."""

from __future__ import annotations

import typer

from kalmix_bench.experiments import all as bench_all
from kalmix_bench.experiments.recall import beliefs as bench_beliefs
from kalmix_bench.runner import report as bench_report

app = typer.Typer(name="bench", help="The experiments of the papers, one a command.", no_args_is_help=True)
for name, command in bench_all.COMMANDS.items():
    app.command(name=name)(command)
app.command(name="all")(bench_all.run)
app.command(name="report")(bench_report.run)
app.command(name="beliefs")(bench_beliefs.run)


@app.callback()
def _group() -> None:
    """A group."""
