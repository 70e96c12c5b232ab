"""`kalmix report`: evaluate a finished run and draw its figures, as `kalmix train` does at its end."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kalmix._extras import require_extra
from kalmix.errors import ArgumentError
from kalmix.files import disk_errors, lock_folder
from kalmix.training.checkpoints import is_checkpoint
from kalmix.training.model_folder import find_model

if TYPE_CHECKING:
    from kalmix.training.evaluation import EvaluationResult
    from kalmix.training.run import Run


def run(
    run: Annotated[Path, typer.Argument(help="Output folder of a finished `kalmix train`, or RUN/checkpoint-N.")],
) -> None:
    """Evaluate a finished run again: bits per byte of held-out text, a sample and figures."""
    report(run, Console(highlight=False))


def report(output: Path, console: Console) -> None:
    """Evaluate the finished run in `output`: write result.json and figures there, and print them.

    Those of a checkpoint are written to RUN/evaluation/checkpoint-N.

    Ctrl-C and SIGTERM end it and print the command that repeats it. The run itself is not changed.

    Raises:
        ArgumentError: there is no finished run, its text or model cannot be read or has changed, or another process
            writes to `output`.
        OSError: the disk is full. The message names the path.
    """
    previous = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _report(output, console)
    except KeyboardInterrupt:
        interruption(output, console)
        raise typer.Exit(130) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, previous)


def interruption(output: Path, console: Console) -> None:
    """Print the command that evaluates a run, or a checkpoint, whose evaluation was interrupted."""
    saved = "" if is_checkpoint(output) else "; training has ended and the model is saved"
    console.print(f"interrupted{saved}. To evaluate it:", soft_wrap=True)
    console.print(f"  kalmix report {output}", style="bold", soft_wrap=True, markup=False)


def _report(output: Path, console: Console) -> None:
    require_extra("`kalmix report`", "train")
    from kalmix.cli.load_run import load_run
    from kalmix.cli.stages import stages
    from kalmix.training.evaluation import evaluate

    with stages(console) as progress:
        progress("loading the run", 0)
        run = load_run(output)
        with lock_folder(run.output), disk_errors(run.output):
            result = evaluate(run, progress)
            written = [find_model(output).weights, result.save(run.output)]
            progress("drawing", 0)
            written += draw_figures(run, result.compressors)
    console.print(_results_table(result))
    if result.warning is not None:
        console.print(f"warning: {result.warning}", style="yellow", soft_wrap=True, markup=False)
    sample = Text(result.prompt + result.sample)
    console.print(Panel(sample, title="a sample", title_align="left", box=box.ROUNDED, style="dim"))
    for path in written:
        console.print(f"  {path}", soft_wrap=True, markup=False)
    name = escape(str(output))
    console.print(
        f"\nnext: [bold]kalmix generate {name}[/], [bold]kalmix inspect {name} --text '...'[/]", soft_wrap=True
    )


def draw_figures(run: Run, rivals: dict[str, float]) -> list[Path]:
    """Draw the loss curve, and the variance and attention maps of a held-out passage if a layer has a posterior."""
    from kalmix.analysis import plots
    from kalmix.analysis.text_diagnostics import diagnose_text
    from kalmix.training.evaluation import excerpt

    curve = run.output / "loss.png"
    plots.loss_curve(curve, run.training, run.held_out, references=rivals)
    try:
        found = diagnose_text(run.model, run.tokenizer, excerpt(run.corpus.held_out), weights=True)
    except ArgumentError:  # no layer has a write gain, such as attention alone
        return [curve]
    assert found.weights is not None
    variance, weights = run.output / "variance.png", run.output / "attention.png"
    plots.posterior_variance(
        variance,
        found.variance,
        found.tokens,
        found.names,
        title="Posterior variance over a held-out passage",
    )
    plots.attention_maps(
        weights,
        found.weights,
        found.tokens,
        found.names,
        title="Kalman attention maps of a held-out passage",
    )
    return [curve, variance, weights]


def _results_table(result: EvaluationResult) -> Table:
    table = Table("held-out text", "bits per byte", "bytes", box=box.SIMPLE_HEAD)
    table.columns[1].justify = table.columns[2].justify = "right"
    table.add_row("uncompressed", "8.000", f"{result.bytes:,}")
    score, rivals = result.bits_per_byte, result.compressors
    best = result.warning is None and score <= min(rivals.values())
    for name, bits in sorted({**rivals, "this model": score}.items(), key=lambda row: -row[1]):
        style = "bold green" if name == "this model" and best else ""
        table.add_row(name, f"{bits:.3f}", f"{bits * result.bytes / 8:,.0f}", style=style)
    return table
