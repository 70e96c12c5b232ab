"""Branches: runs that continue from a checkpoint of another run, with another length, cooldown or other data."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

from kalmix.errors import ArgumentError
from kalmix.files import read_json, sync, sync_tree, write_text
from kalmix.training import inputs
from kalmix.training.batching import count_steps, plan_batches
from kalmix.training.checkpoints import (
    CHECKPOINTS,
    STATE_FILE,
    check_intact,
    check_step_size,
    checkpoint_step,
    find_checkpoint,
    newest_checkpoint,
    read_input_digests,
    read_settings,
    renew_manifest,
    run_of,
)
from kalmix.training.recipe import Recipe
from kalmix.training.saving import UNFINISHED_FOLDER
from kalmix.training.shards.manifest import Manifest
from kalmix.training.shards.mixture import equal_fractions, folder_weights, fractions
from kalmix.training.shards.trainer_position import DataPosition

BRANCH_FILE = "branch.json"
_TOLERANCE = 1e-9  # of fractions of a run
_NAME = "branch_from"


def begin_branch(recipe: Recipe, checkpoint: Path, output: Path, data: inputs.Digests, processes: int) -> None:
    """Write the files with which a branch begins: tokenizer, branch.json, recipe.json, and a copy of the checkpoint.

    `resume=True` then continues it. Files of the checkpoint are linked instead of copied where the file system allows
    it. The checkpoint comes last: without it, a branch has not begun. The warmup keeps its number of steps, so that the
    branch equals a run that had its recipe from the start. If the settings name other shards, or other weights, their
    data begin at the start.

    Args:
        recipe: settings of the branch. Its `warmup` is that of the run.
        checkpoint: checkpoint of the run, as `find_start` returns it.
        output: folder of the branch.
        data: digests of the branch's data, and of their tokenizer or that of the run.
        processes: number of processes that will train.

    Raises:
        ArgumentError: the run has a time limit or no constant rate; the checkpoint, or the branch at its step, is in
            the cooldown; the branch ends before, or is too short for its warmup; the data have changed without another
            name; other shards have another tokenizer or begin documents with another token; the run trains on text and
            the branch on shards, or the reverse; a step would see another number of sequences.
    """
    run, before = run_of(checkpoint), read_settings(checkpoint)
    restarts = _has_other_data(before, recipe, checkpoint, data)
    recipe = _plan(before, recipe, checkpoint)
    batching = plan_batches(recipe, processes)
    check_step_size(checkpoint, processes, batching.rows * batching.accumulation * processes)
    folder, unfinished = output / CHECKPOINTS, output / CHECKPOINTS / UNFINISHED_FOLDER
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(checkpoint, unfinished / checkpoint.name, copy_function=_link)
    if restarts:
        _restart_data(unfinished / checkpoint.name)
    renew_manifest(unfinished / checkpoint.name, data, recipe, [STATE_FILE] if restarts else [])
    sync_tree(unfinished)
    other = shutil.ignore_patterns("*.safetensors*", "config.json", "generation_config.json")
    shutil.copytree(run / "model", output / "model", ignore=other, dirs_exist_ok=True)
    sync_tree(output / "model")
    origin = {"run": str(run.resolve()), "step": checkpoint_step(checkpoint), "data": "new" if restarts else "same"}
    write_text(output / BRANCH_FILE, json.dumps(origin, indent=1) + "\n")
    recipe.save(output)
    (unfinished / checkpoint.name).rename(folder / checkpoint.name)
    unfinished.rmdir()
    sync(folder)


def check_has_begun(output: Path) -> None:
    """Check that a run without an intact checkpoint is not a branch, which must not start from the beginning."""
    if (output / BRANCH_FILE).exists():
        origin = read_json(output / BRANCH_FILE)
        got = f"{str(output)!r}, a branch without an intact checkpoint"
        hint = f"Branch again from step {origin['step']:,} of {origin['run']}, into a new folder"
        raise ArgumentError("output", got=got, expected="a branch that can be resumed", hint=hint)


def _has_other_data(before: Recipe, recipe: Recipe, checkpoint: Path, data: inputs.Digests) -> bool:
    """Return whether the settings of a branch name other shards, or other weights of them, than those of its run."""
    if (before.shards is None) != (recipe.shards is None):
        kinds = {True: "text", False: "shards"}
        problem = f"trains on {kinds[before.shards is None]}, and the branch on {kinds[recipe.shards is None]}"
        raise ArgumentError(_NAME, problem=problem, expected="the same kind of data")
    saved = read_input_digests(checkpoint)
    if recipe.shards == before.shards:
        inputs.check(data, saved, f"when {str(checkpoint)!r} was saved", "to branch from it")
        return False
    if data["tokenizer"] != saved["tokenizer"]:
        expected = "shards that `kalmix data prepare --tokenizer` made with the tokenizer of the run"
        raise ArgumentError("shards", problem="have another tokenizer than the run", expected=expected)
    first = Path(next(iter(folder_weights(recipe.shards))))  # the loader compares the others with it
    begin = Manifest.load(first).other_begin(checkpoint)
    if begin is not None:
        problem = "begin documents with another token than the run"
        expected = f"token {begin}, as `kalmix data prepare --bos` chooses it"
        raise ArgumentError("shards", problem=problem, expected=expected)
    return data["shards"] != saved["shards"] or not equal_fractions(fractions(recipe.shards), fractions(before.shards))


def _restart_data(checkpoint: Path) -> None:
    """Let the run of a checkpoint read its data from the start; this changes the state of the Trainer.

    Args:
        checkpoint: copy of a checkpoint; its files may be links.
    """
    state = read_json(checkpoint / STATE_FILE)
    state["stateful_callbacks"][DataPosition.__name__] = DataPosition.at_start()
    write_text(checkpoint / STATE_FILE, json.dumps(state, indent=2, sort_keys=True) + "\n")


def find_start(start: Path) -> Path:
    """Return the checkpoint with which a branch begins.

    Args:
        start: run, or checkpoint of it, as in `run_of`; the newest intact checkpoint of a run.

    Raises:
        ArgumentError: there is no run or no such checkpoint, or it is damaged.
    """
    run = run_of(start)
    Recipe.load(run)  # to say so if it is no run
    folder = run / CHECKPOINTS
    checkpoint = newest_checkpoint(folder) if start == run else find_checkpoint(start, _NAME)
    if checkpoint is None:
        got, hint = f"{str(start)!r}, which holds no checkpoint", "A finished run has those of `keep_steps` only"
        raise ArgumentError(_NAME, got=got, expected="a run with checkpoints", hint=hint)
    check_intact(checkpoint, _NAME)
    return checkpoint


def _plan(before: Recipe, recipe: Recipe, checkpoint: Path) -> Recipe:
    """Check that a branch can begin at a checkpoint, and return its recipe, with the warmup of the run in steps."""
    for each in (before, recipe):
        if each.minutes is not None:
            raise ArgumentError("minutes", got=each.minutes, expected="none: runs with a time limit have no branches")
        if each.schedule == "cosine":
            expected = "'trapezoid' or 'wsd', which have a constant rate to branch from"
            raise ArgumentError("schedule", got="'cosine'", expected=expected)
    row = next(row for row in reversed(read_json(checkpoint / STATE_FILE)["log_history"]) if "tokens" in row)
    step, step_tokens = checkpoint_step(checkpoint), row["tokens"] // row["step"]
    old, new = count_steps(before, step_tokens), count_steps(recipe, step_tokens)
    assert old is not None and new is not None
    if step / old > 1 - before.cooldown + _TOLERANCE:
        last = math.floor((1 - before.cooldown + _TOLERANCE) * old)
        got = f"{str(checkpoint)!r}, which is in the cooldown of its run"
        raise ArgumentError(_NAME, got=got, expected=f"a checkpoint of step {last:,} or before, when it begins")
    if new <= step:
        name, size = ("steps", 1) if recipe.tokens is None else ("tokens", step_tokens)
        problem = f"is {getattr(recipe, name):,}, and {checkpoint.name} has trained {step * size:,}"
        raise ArgumentError(name, problem=problem, expected="more")
    if step / new > 1 - recipe.cooldown + _TOLERANCE:
        problem = f"is {recipe.cooldown:g}, so that it begins at step {(1 - recipe.cooldown) * new:,.0f} of {new:,}"
        most = math.floor(1e4 * (1 - step / new)) / 1e4
        expected = f"at most {most:g}, to begin after {checkpoint.name}"
        raise ArgumentError("cooldown", problem=problem, expected=expected)
    warmup, rest = recipe.warmup * old, (1 - recipe.cooldown) * new
    if warmup > rest + _TOLERANCE * new:
        problem = f"is {recipe.cooldown:g}, so that it begins at step {rest:,.0f} of {new:,}"
        raise ArgumentError("cooldown", problem=problem, expected=f"one after the warmup of {warmup:,.0f} steps")
    return replace(recipe, warmup=min(warmup, rest) / new)


def _link(source: str, target: str) -> None:
    """Give a file a second name, or copy it if that is impossible. Files of checkpoints are never changed in place."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
