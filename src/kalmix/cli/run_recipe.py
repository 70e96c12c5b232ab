"""Run of a recipe on the command line: progress, interruption and report. `train` and `pretrain` share it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import typer
from rich.console import Console

from kalmix._extras import require_extra
from kalmix.errors import ArgumentError
from kalmix.training.recipe import Recipe
from kalmix.training.recipe_files import change_recipe


def output_folder(output: str | None) -> Path:
    """Return the folder of a run; by default runs/TIME.

    Raises:
        ArgumentError: `output` is empty.
    """
    if output is not None and not output.strip():
        raise ArgumentError("output", got="empty", expected="the path of a folder")
    return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}" if output is None else Path(output)


def resumed_recipe(context: typer.Context, output: str | None, settings: Sequence[str] | None = None) -> Recipe:
    """Return the recipe of the run to resume.

    Args:
        context: options of the command.
        output: folder of the run.
        settings: settings of --set; `None` if the command has no such option.

    Raises:
        ArgumentError: `output` or the run is missing, a setting may not change, or another option is given.
    """
    if output is None:
        raise ArgumentError("output", problem="is missing", expected="the folder of the run, with --resume")
    allowed = ("output", "resume") if settings is None else ("output", "resume", "settings")
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in allowed and source is not None and source.name == "COMMANDLINE":
            name, hint = parameter.opts[0].lstrip("-").replace("-", "_"), "A resumed run keeps its settings"
            expected = "only --output" if settings is None else "only --output and --set"
            raise ArgumentError(name, problem="is given with --resume", expected=expected, hint=hint)
    return change_recipe(Recipe.load(Path(output)), settings or ())


def run_recipe(recipe: Recipe, folder: Path, *, resume: bool, command: str, branch_from: str | None = None) -> None:
    """Train by a recipe, show progress, and evaluate a run on text as `kalmix report` does.

    Args:
        recipe: settings of the run.
        folder: folder of the run.
        resume: continue the run in `folder`.
        command: name of the command, which a user repeats to resume.
        branch_from: run or checkpoint to begin with.
    """
    require_extra(f"`kalmix {command}`", "train")
    from transformers.utils import logging

    from kalmix.cli.progress import ProgressBar
    from kalmix.cli.report import interruption, report
    from kalmix.training.run import train
    from kalmix.training.trainer import process_state

    logging.disable_progress_bar()
    console = Console(highlight=False)
    first = process_state().is_main_process
    if first:
        console.print(f"reading {_data(recipe)}", soft_wrap=True, markup=False)
        if branch_from is not None:
            console.print(f"continuing from {branch_from}", soft_wrap=True, markup=False)
    progress = ProgressBar(console, detailed=command == "pretrain")
    result = train(recipe, folder, resume=resume, branch_from=branch_from, callbacks=[progress])
    if not result.finished:
        if first:
            console.print(f"interrupted after {result.steps} steps; to continue:", soft_wrap=True)
            console.print(f"  kalmix {command} --resume --output {folder}", style="bold", soft_wrap=True, markup=False)
        raise typer.Exit(130)
    folder, interrupted = result.output, result.interrupted
    if recipe.shards is not None:
        if first:
            for name, curve in (("training", result.training), ("held-out", result.held_out)):
                if curve:
                    console.print(f"{name} text: {curve[-1][1]:.4f} bits per byte", soft_wrap=True)
            console.print(f"  {folder / 'model'}", soft_wrap=True, markup=False)
        return
    del result  # frees the model; the report loads it again
    if interrupted and first:
        interruption(folder, console)
    if interrupted:
        raise typer.Exit(130)
    if first:
        report(folder, console)


def _data(recipe: Recipe) -> str:
    """Return a name of the data, for the console."""
    if isinstance(recipe.shards, dict):
        return ", ".join(f"{folder} (weight {weight:g})" for folder, weight in recipe.shards.items())
    return recipe.shards or recipe.text or "the documentation of this Python installation"
