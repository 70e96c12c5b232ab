"""The commands put together, and how each of them fails: one clear line and an exit status."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

try:
    import typer
    from rich.console import Console
except ImportError:
    sys.exit("the command line needs typer and rich: pip install 'kalmix[all]'")

from kalmix.cli import doctor, explain, generate, inspect, report, train

app: typer.Typer = typer.Typer(
    name="kalmix",
    help="Sequence layers that are Bayesian filters: train one, ask it what it believes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (train, report, generate, inspect, explain, doctor):
    app.command(name=command.__name__.rpartition(".")[2])(command.run)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    rich_help_panel="With kalmix-bench",
)
def bench(context: typer.Context) -> None:
    """Run the experiments of the papers, one a command."""
    found = entry_points(group="kalmix.commands", name="bench")
    if not found:
        _fail("`kalmix bench` needs the package kalmix-bench: pip install kalmix-bench", status=1)
    next(iter(found)).load()(context.args, prog_name="kalmix bench")


def main() -> None:
    """Run the command line; mistakes of the caller exit with 2, failures of the machine with 1."""
    try:
        with _one_line_messages():
            app()
    except ValueError as error:
        if not type(error).__module__.startswith(("kalmix.", "kalmix_bench.")):
            raise  # a mistake of ours, which wants its traceback
        _fail(str(error), status=2)
    except ImportError as error:
        _fail(f"{error}; pip install 'kalmix[all]' brings all that the command line needs", status=1)
    except OSError as error:
        named = error.filename is not None and error.strerror is not None
        _fail(f"{error.strerror}: {str(error.filename)!r}" if named else str(error), status=1)
    except KeyboardInterrupt:
        _fail("interrupted", status=130)


@contextmanager
def _one_line_messages() -> Iterator[None]:
    """Print a warning of kalmix as one line, and nothing when a thread fails to write: its main thread reports that."""
    show, hook = warnings.showwarning, threading.excepthook
    packages = [find_spec(name) for name in ("kalmix", "kalmix_bench")]
    folders = [folder for found in packages if found for folder in found.submodule_search_locations or ()]

    def print_warning(message: Warning | str, category: type[Warning], filename: str, *place: Any) -> None:
        if category is UserWarning and any(map(Path(filename).is_relative_to, folders)):
            Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(f"warning: {message}")
        else:
            show(message, category, filename, *place)

    def print_exception(failure: threading.ExceptHookArgs) -> None:
        if not issubclass(failure.exc_type, OSError):
            hook(failure)

    with warnings.catch_warnings():
        warnings.showwarning, threading.excepthook = print_warning, print_exception
        try:
            yield
        finally:
            threading.excepthook = hook


def _fail(message: str, *, status: int) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print("[bold red]error:[/]", end=" ")
    Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(message)
    sys.exit(status)
