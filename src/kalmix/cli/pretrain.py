"""`kalmix pretrain`: train a language model by a recipe in a TOML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kalmix._extras import require_extra
from kalmix.cli.run_recipe import output_folder, resumed_recipe, run_recipe
from kalmix.errors import ArgumentError
from kalmix.training.checkpoints import run_of
from kalmix.training.recipe import Recipe
from kalmix.training.recipe_files import change_recipe, read_recipe, recipe_names
from kalmix.validation import check_positive_int

ASSUMED_MFU = 0.3  # of --dry-run


def run(
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(help="TOML file, or the name of a recipe of a paper (`kalmix list recipes`).")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Setting that replaces one of the recipe; repeatable. With --resume: paths of data, checkpoints, log; "
            "with --branch-from also other shards, steps, tokens, schedule, cooldown.",
        ),
    ] = None,
    output: Annotated[str | None, typer.Option(help="Output folder. Default: runs/TIME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --output with its settings.")] = False,
    branch_from: Annotated[
        str | None,
        typer.Option(
            metavar="RUN[/checkpoint-N]",
            help="In place of RECIPE: begin at this checkpoint of another run, before its cooldown.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print size, work, memory and an estimated time, and stop.")
    ] = False,
    gpus: Annotated[int | None, typer.Option(help="GPUs of --dry-run. Default: torchrun's processes, or 1.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Name of the GPU of --dry-run, such as H200.")] = None,
    mfu: Annotated[
        float,
        typer.Option(
            help="Fraction of the GPU's peak that --dry-run assumes (MFU). Measured values are lower for layers such "
            "as KLA: 0.12 to 0.29 for models of 50M parameters, 0.12 to 0.35 for 340M."
        ),
    ] = ASSUMED_MFU,
) -> None:
    """Train a language model by a recipe, on token shards or text.

    Start it with `torchrun --nproc-per-node N -m kalmix.cli pretrain ...` on N GPUs.
    """
    folder = output_folder(output)
    if resume:
        saved = resumed_recipe(context, output, settings or ())
        run_recipe(replace(_with_absolute_paths(saved), initial=saved.initial), folder, resume=True, command="pretrain")
        return
    read = _read(recipe, settings or (), branch_from)
    if dry_run:
        if read.initial is not None and branch_from is None:  # a branch has the weights of its checkpoint
            _check_initial(read.initial)
        _describe(read, gpus, gpu, mfu)
        return
    if read.shards is None and read.text is None and branch_from is None:
        expected = "`--set shards=FOLDER` with token shards (`kalmix data prepare`), or `--set text=PATH`"
        raise ArgumentError("shards", problem="is missing, and so is `text`", expected=expected)
    run_recipe(read, folder, resume=False, command="pretrain", branch_from=branch_from)


def _read(recipe: str | None, settings: Sequence[str], branch_from: str | None) -> Recipe:
    """Return the recipe of a new run, or of a branch."""
    if branch_from is not None:
        if recipe is not None:
            hint = "A branch has the settings of its run"
            raise ArgumentError("recipe", problem="is given with --branch-from", expected="only --set", hint=hint)
        saved = Recipe.load(run_of(Path(branch_from)))
        changed = _with_absolute_paths(change_recipe(saved, settings, branch=True))
        return replace(changed, initial=saved.initial)
    if recipe is None:
        expected = f"a TOML file, or one of {', '.join(recipe_names())}"
        raise ArgumentError("recipe", problem="is missing", expected=expected)
    return _with_absolute_paths(read_recipe(recipe, settings))


def _with_absolute_paths(recipe: Recipe) -> Recipe:
    """Return the recipe with absolute paths, so that a run can be resumed from another folder.

    Raises:
        ArgumentError: two paths of `shards` lead to one folder.
    """

    def absolute(path: str | None) -> str | None:
        return str(Path(path).resolve()) if path and path.strip() else path

    shards = recipe.shards
    if isinstance(shards, dict):
        paths = [str(Path(folder).resolve()) for folder in shards]
        twice = next((path for path in paths if paths.count(path) > 1), None)
        if twice is not None:
            raise ArgumentError("shards", problem=f"names {twice!r} twice", expected="each folder once")
        shards = dict(zip(paths, shards.values(), strict=True))
    else:
        shards = absolute(shards)
    return replace(recipe, text=absolute(recipe.text), initial=absolute(recipe.initial), shards=shards)


def _check_initial(initial: str) -> None:
    """Check that there are initial weights; a run then checks that they fit its model and data."""
    require_extra("`kalmix pretrain`", "train")
    from kalmix.training.initial_model import find_weights

    find_weights(initial)


def _describe(recipe: Recipe, gpus: int | None, gpu: str | None, mfu: float) -> None:
    """Print the estimates of a recipe."""
    require_extra("`kalmix pretrain`", "train")
    import torch

    from kalmix.training.batching import plan_batches
    from kalmix.training.estimates import PEAKS, estimate, peak_flops
    from kalmix.training.peers import launched_processes

    if not 0 < mfu <= 1:
        raise ArgumentError("mfu", got=mfu, expected="a fraction above 0 and at most 1")
    devices = launched_processes() if gpus is None else gpus
    check_positive_int("gpus", devices)
    batching = plan_batches(recipe, devices)
    found = estimate(recipe, batching)
    console = Console(highlight=False, soft_wrap=True)
    if recipe.description:
        console.print(recipe.description, markup=False)
    vocabulary = f"{found.vocabulary_parameters:,} in embedding and head"
    blocks = f"{len(recipe.layers)} blocks of width {recipe.hidden_size:,}"
    console.print(f"{found.parameters:,} parameters ({vocabulary}), {blocks}")
    rows = f"{batching.rows} x {recipe.seq_len:,} tokens, {batching.accumulation} batches a step, {devices} devices"
    total = "" if batching.steps is None else f"{batching.steps * batching.step_tokens:,} tokens in {batching.steps:,} "
    console.print(f"{total}steps of {batching.step_tokens:,} tokens ({rows})")
    work = "" if found.flops is None else f", {found.flops:.3g} in total"
    console.print(f"{found.step_flops / batching.step_tokens:.3g} FLOPs a token{work}")
    state, activations = (x / 2**30 for x in (found.state_bytes, found.activation_bytes))
    parts = f"{state:.1f} weights, gradients and optimizer; about {activations:.1f} activations"
    console.print(f"about {state + activations:.1f} GiB on each device ({parts})")
    name = gpu or (torch.cuda.get_device_name() if torch.cuda.is_available() else None)
    peak = None if name is None else peak_flops(name, recipe.bf16)
    hours = None if peak is None else found.hours(peak, devices, mfu)
    if hours is None:
        known = ", ".join(sorted(x.name for x in PEAKS))
        missing = "time alone limits the run" if peak else f"the GPU is not known; --gpu accepts {known}"
        console.print(f"no estimated time: {missing}")
    else:
        console.print(f"about {hours:,.1f} hours on {devices} x {name} at an MFU of {100 * mfu:g}%, an assumption")
