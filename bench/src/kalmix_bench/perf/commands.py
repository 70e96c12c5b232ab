"""Command group `kalmix bench perf`."""

from __future__ import annotations

import typer

from kalmix_bench.perf import parts
from kalmix_bench.perf.decode import experiment as decode
from kalmix_bench.perf.models import experiment as models

app = typer.Typer(name="perf", help="Time models and their parts next to other libraries.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Make typer treat `perf` as a group of commands."""


app.command(name="models")(models.run)
app.command(name="decode")(decode.run)
app.command(name="parts")(parts.run)
