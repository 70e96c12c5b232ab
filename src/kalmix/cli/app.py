"""The `kalmix` command: subcommands, exit statuses and error messages."""

from __future__ import annotations

import platform
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import EPIPE
from importlib.metadata import entry_points
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, Any, Literal, NoReturn

try:
    import typer
    from rich.console import Console
    from rich.text import Text
except ImportError:
    sys.exit("error: the command line needs typer and rich, which are not installed: pip install 'kalmix[cli]'")

from kalmix._extras import missing_package
from kalmix.cli import data, doctor, explain, generate, inspect, list_names, pretrain, report, train
from kalmix.cli import eval as evaluate
from kalmix.cli.list_names import INSTALL_BENCH

NARROW = 60  # columns; below, help is plain text, since tables would cut option names

app: typer.Typer = typer.Typer(
    name="kalmix",
    help="Sequence layers that are Bayesian filters: train a model and inspect its beliefs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        import torch

        import kalmix

        typer.echo(f"kalmix {kalmix.__version__} (torch {torch.__version__}, Python {platform.python_version()})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print versions and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Define the options of `kalmix` itself."""


_COMMANDS: dict[str, Callable[..., None]] = {
    "train": train.run,
    "pretrain": pretrain.run,
    "report": report.run,
    "eval": evaluate.run,
    "generate": generate.run,
    "inspect": inspect.run,
    "list": list_names.run,
    "explain": explain.run,
    "doctor": doctor.run,
}
for name, command in _COMMANDS.items():
    app.command(name=name)(command)
app.add_typer(data.app)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    rich_help_panel="With kalmix-bench",
)
def bench(context: typer.Context) -> None:
    """Run the papers' experiments; `kalmix bench --help` lists them."""
    found = entry_points(group="kalmix.commands", name="bench")
    if not found:
        _fail(f"`kalmix bench` needs the package kalmix-bench. {INSTALL_BENCH}", status=1)
    next(iter(found)).load()(context.args, prog_name="kalmix bench")


def main() -> None:
    """Run the command line. It exits with 2 on invalid input and with 1 on any other failure."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal lacks is printed as "?"
    app.rich_markup_mode = _help_style()
    try:
        with _one_line_messages():
            try:
                app()
            finally:
                sys.stdout.flush()  # here, so that a full disk is reported below
    except ValueError as error:
        if not type(error).__module__.startswith(("kalmix.", "kalmix_bench.")):
            raise  # a defect of kalmix: keep its traceback
        _fail(str(error), status=2)
    except ImportError as error:
        named = "pip install" in str(error)  # an error of `kalmix._extras`
        _fail(str(error) if named else missing_package(error.name) or str(error), status=1)
    except OSError as error:
        _drop_output()
        if error.errno == EPIPE:  # the reader of a pipe, such as `head`, has ended
            sys.exit(1)
        reason = error.strerror or str(error)
        _fail(reason if error.filename is None else f"{reason}: {str(error.filename)!r}", status=1)
    except KeyboardInterrupt:
        _fail("interrupted", status=130)


def _help_style() -> Literal["rich"] | None:
    return "rich" if get_terminal_size().columns >= NARROW else None


def _drop_output() -> None:
    """Discard the buffer of standard output, so that Python does not fail to write it at exit."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    with suppress(OSError, ValueError):
        sys.stdout.close()


@contextmanager
def _one_line_messages() -> Iterator[None]:
    """Print a warning of kalmix as one line, and no traceback of a thread that fails to write.

    The main thread reports such a failure.
    """
    show, hook = warnings.showwarning, threading.excepthook
    packages = [find_spec(name) for name in ("kalmix", "kalmix_bench")]
    folders = [folder for found in packages if found for folder in found.submodule_search_locations or ()]

    def print_warning(message: Warning | str, category: type[Warning], filename: str, *rest: Any) -> None:
        if category is UserWarning and any(map(Path(filename).is_relative_to, folders)):
            Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(f"warning: {message}")
        else:
            show(message, category, filename, *rest)

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
    error = Text.assemble(("error:", "bold red"), " ", message)  # one write, as other processes may print an error, too
    Console(stderr=True, soft_wrap=True, highlight=False).print(error)
    sys.exit(status)
