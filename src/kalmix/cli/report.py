"""What a training run shows at its end: a verdict, a sample, pictures, and where everything lies."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kalmix import plots
from kalmix.errors import ArgumentError
from kalmix.training.evaluation import bits_per_byte, compressors
from kalmix.training.reading import read
from kalmix.training.run import Run
from kalmix.training.sampling import generate

PASSAGE = 200  # characters of held-out text in the pictures


def report(run: Run, console: Console) -> None:
    """Judge a finished run, draw it, and print what came of it."""
    with console.status("reading the held-out text"):
        score = bits_per_byte(
            run.model, run.tokenizer, run.corpus.held_out, window=run.recipe.block, batch=run.recipe.batch
        )
        rivals = compressors(run.corpus.held_out)
    with console.status("drawing"):
        written = [run.output / "model", *pictures(run, rivals)]
    console.print(_verdict(score, rivals, len(run.corpus.passage.encode())))
    console.print(Panel(Text(_sample(run)), title="a sample", title_align="left", box=box.ROUNDED, style="dim"))
    for path in written:
        console.print(f"  {path}", soft_wrap=True)
    console.print(
        f"\nask it: [bold]kalmix generate {run.output}[/], [bold]kalmix inspect {run.output} --text '...'[/]",
        soft_wrap=True,
    )


def pictures(run: Run, rivals: dict[str, float]) -> list[Path]:
    """The loss curve; and, where a layer has a posterior, its variance and attention map over a held-out passage."""
    curve = run.output / "loss.png"
    plots.loss_curve(curve, run.training, run.held_out, references=rivals)
    passage = _passage(run.corpus.held_out)
    try:
        reading = read(run.model, run.tokenizer, passage, weights=True)
    except ArgumentError:  # attention alone holds no belief
        return [curve]
    assert reading.weights is not None
    variance, weights = run.output / "variance.png", run.output / "attention.png"
    plots.posterior_variance(
        variance, reading.variance, reading.tokens, reading.names, title="Posterior variance over a held-out passage"
    )
    plots.attention_maps(
        weights, reading.weights, reading.tokens, reading.names, title="Kalman attention maps of a held-out passage"
    )
    return [curve, variance, weights]


def _passage(documents: tuple[str, ...]) -> str:
    """The beginning of the longest held-out document."""
    return max(documents, key=len).strip()[:PASSAGE]


def _sample(run: Run) -> str:
    start = _passage(run.corpus.held_out).split("\n")[0][:60]
    return start + generate(run.model, run.tokenizer, start, tokens=160, temperature=0.7)


def _verdict(score: float, rivals: dict[str, float], size: int) -> Table:
    table = Table("held-out text", "bits per byte", "bytes", box=box.SIMPLE_HEAD)
    table.columns[1].justify = table.columns[2].justify = "right"
    table.add_row("as it is", "8.000", f"{size:,}")
    rows = {**rivals, "this model": score}
    for name, bits in sorted(rows.items(), key=lambda row: -row[1]):
        style = "bold green" if name == "this model" and score <= min(rows.values()) else ""
        table.add_row(name, f"{bits:.3f}", f"{bits * size / 8:,.0f}", style=style)
    return table
