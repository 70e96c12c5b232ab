"""The commands put together, and how each of them fails: one clear line and an exit status."""

from __future__ import annotations

import sys

try:
    import typer
    from rich.console import Console
except ImportError:
    sys.exit("the command line needs typer and rich: pip install 'kalmix[all]'")

from kalmix.cli import bench, doctor, explain, generate, inspect, report, train

app = typer.Typer(
    name="kalmix",
    help="Sequence layers that are Bayesian filters: train one, ask it what it believes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (train, report, generate, inspect, explain, doctor):
    app.command(name=command.__name__.rpartition(".")[2])(command.run)
app.add_typer(bench.app)


def main() -> None:
    """Run the command line; mistakes of the caller exit with 2, failures of the machine with 1."""
    try:
        app()
    except ValueError as error:
        if not type(error).__module__.startswith("kalmix."):  # a mistake of ours, which wants its traceback
            raise
        _fail(str(error), status=2)
    except ImportError as error:
        _fail(f"{error}; pip install 'kalmix[all]' brings all that the command line needs", status=1)
    except OSError as error:
        _fail(str(error), status=1)
    except KeyboardInterrupt:
        _fail("interrupted", status=130)


def _fail(message: str, *, status: int) -> None:
    Console(stderr=True, soft_wrap=True).print("[bold red]error:[/]", end=" ")
    Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(message)
    sys.exit(status)
