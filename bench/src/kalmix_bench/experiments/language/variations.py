"""Train the first tokens of a preset's model with other settings, to find what makes it learn slowly.

    python -m kalmix_bench.experiments.language.variations --preset medium --shards SHARDS --output rows.jsonl \\
        --tokens 6.5e6 --rate 4e-3 kla 'kla {"bf16": false}' 'kla:{"expand": 2} {"clip": null}'

Each variation is a layer and, behind a space, settings of `kalmix.training.Recipe` that differ, as a JSON object; those
of "model" are added to the preset's. Its model is that of the stage "main". The learning rate falls to its end within
the tokens given here. A row has the layer, the settings, held-out and training losses, and gradient norms: of all
parameters, and at each step, after clipping, of each block and of each kind of parameter ("mixer.in_proj.weight" of
all blocks together). Variations run side by side, one on each GPU. Those in the output file do not run again. One that
fails has no row; the others run, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.utils import logging

from kalmix.errors import ArgumentError
from kalmix.training.provenance import provenance
from kalmix.training.recipe import Recipe
from kalmix.training.run import read_history, train
from kalmix.training.shards import Manifest
from kalmix_bench.experiments.language import corpus
from kalmix_bench.experiments.language.protocol import MAIN, PRESETS, LanguageCell, Preset
from kalmix_bench.runner import options
from kalmix_bench.runner.json_lines import append_rows, read_rows

_Task = tuple[Recipe, dict[str, Any]]  # recipe, and what defines the row


class GradientNorms(TrainerCallback):
    """Callback that keeps the gradient norms of each kind of parameter, and of each block, at each step."""

    def __init__(self) -> None:
        self.kinds: dict[str, list[float]] = defaultdict(list)
        self.blocks: dict[str, list[float]] = defaultdict(list)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        kinds: dict[str, list[torch.Tensor]] = defaultdict(list)
        blocks: dict[str, list[torch.Tensor]] = defaultdict(list)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                kind, block = kind_and_block(name)
                kinds[kind].append(parameter.grad)
                if block is not None:
                    blocks[block].append(parameter.grad)
        for groups, kept in ((kinds, self.kinds), (blocks, self.blocks)):
            norms = torch.stack([torch.nn.utils.get_total_norm(gradients) for gradients in groups.values()])
            for name, norm in zip(groups, norms.tolist(), strict=True):
                kept[name].append(float(f"{norm:.4g}"))


def kind_and_block(name: str) -> tuple[str, str | None]:
    """Return the name of a parameter within its block, and the number of the block, if it is in one."""
    parts = name.split(".")
    numbers = [n for n, part in enumerate(parts) if part.isdigit()]
    return (".".join(parts[numbers[0] + 1 :]), parts[numbers[0]]) if numbers else (name, None)


def recipe_of(
    variation: str, preset: Preset, shards: Path, tokens: int, rate: float, seed: int = 0
) -> tuple[Recipe, dict[str, Any]]:
    """Return the recipe of a variation, and what defines its row.

    Args:
        variation: layer and, behind a space, other settings of the recipe as a JSON object.
        preset: sizes of the model and of its training.
        shards: folder of token shards.
        tokens: training tokens.
        rate: learning rate.
        seed: seed of weights and data.

    Raises:
        ArgumentError: the layer or a setting is unknown, or the settings are not a JSON object.
    """
    layer, settings = _parse(variation)
    size = replace(preset.main, tokens=tokens)
    cell = LanguageCell(MAIN, layer, size, rate, seed, corpus.digest(Manifest.load(shards)))
    recipe = cell.recipe(str(shards))
    changes = {**settings, "model": {**recipe.model, **settings.get("model", {})}}
    unknown = sorted(changes.keys() - vars(recipe).keys())
    if unknown:
        raise ArgumentError("variation", got=repr(unknown[0]), expected="settings of `kalmix.training.Recipe`")
    changes = {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}
    return replace(recipe, **changes), {**cell.to_dict(), "settings": settings}


def _parse(variation: str) -> tuple[str, dict[str, Any]]:
    """Return layer and settings of a variation."""
    layer = variation.split(" ", 1)[0]
    end = len(layer)
    if ":" in layer:  # options, which may have spaces
        end = layer.index(":") + 1
        try:
            end += json.JSONDecoder().raw_decode(variation[end:])[1]
        except ValueError:
            end = len(variation)  # the layer's own check says what is wrong
    text = variation[end:].strip()
    try:
        settings = json.loads(text or "{}")
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ArgumentError("variation", got=repr(text), expected="settings of a recipe as a JSON object")
    return variation[:end], settings


def run_variation(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Train and return the losses and gradient norms; `diverged` if the loss did not stay finite.

    Raises:
        KeyboardInterrupt: a signal ended the training.
    """
    norms, row = GradientNorms(), {}
    try:
        run = train(recipe, folder, callbacks=[norms])
        if not run.finished:
            raise KeyboardInterrupt
        history = run.history
    except ArgumentError as error:
        if error.name != "learning_rate":
            raise
        row, history = {"diverged": str(error)}, read_history(folder)
    training = [each for each in history if "loss" in each]
    held_out = [each for each in history if "eval_loss" in each]
    return row | {
        "loss": held_out[-1]["eval_loss"] if held_out and not row else None,
        "held_out": {"tokens": [x["tokens"] for x in held_out], "loss": [round(x["eval_loss"], 4) for x in held_out]},
        "curve": {"tokens": [x["tokens"] for x in training], "loss": [round(x["loss"], 4) for x in training]},
        "gradient_norm": [x.get("grad_norm") for x in training],
        "clipped_norms": {"kinds": dict(norms.kinds), "blocks": dict(norms.blocks)},
    }


def main() -> None:
    """Train variations from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variations", nargs="+", help="layer and, behind a space, settings of the recipe as JSON")
    parser.add_argument("--preset", choices=tuple(PRESETS), required=True, help="preset of `kalmix bench language`")
    parser.add_argument("--shards", type=Path, required=True, help="folder of token shards")
    parser.add_argument("--tokens", type=float, required=True, help="training tokens of each variation")
    parser.add_argument("--rate", type=float, required=True, help="learning rate, unless a variation has another")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data")
    parser.add_argument("--output", type=Path, required=True, help="file for rows as JSON lines")
    parser.add_argument("--commit", help="commit for the rows, where there is no git")
    given = parser.parse_args()
    known, waiting = read_rows(given.output), []
    for variation in given.variations:
        recipe, row = recipe_of(
            variation, PRESETS[given.preset], given.shards, int(given.tokens), given.rate, given.seed
        )
        if any(row.items() <= each.items() for each in known):
            print(f"already there: {variation}", flush=True)
        else:
            waiting.append((recipe, {**row, "variation": variation}))
    failed = False
    for row in _run_all(waiting, options.gpus(None)):
        if "failed" in row:
            print(f"failed: {row['variation']}: {row['failed']}", file=sys.stderr, flush=True)
            failed = True
            continue
        append_rows(given.output, [row if given.commit is None else {**row, "commit": given.commit}])
        print(f"{row['seconds']:6.1f} s  {row['variation']}  {' '.join(map(str, row['held_out']['loss']))}", flush=True)
    if failed:
        raise SystemExit(1)


def _run_all(waiting: Sequence[_Task], devices: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run variations, one at a time on each GPU, and yield their rows as they end."""
    if len(devices) == 1:
        yield from map(_run, waiting)
        return
    context = multiprocessing.get_context("spawn")
    free = context.SimpleQueue()
    for device in devices:
        free.put(device)
    with ProcessPoolExecutor(len(devices), context, _take_gpu, (free,)) as pool:
        for future in as_completed([pool.submit(_run, task) for task in waiting]):
            yield future.result()


def _take_gpu(free: SimpleQueue[str]) -> None:
    """Let this process see one GPU only."""
    os.environ["CUDA_VISIBLE_DEVICES"] = free.get()


def _run(task: _Task) -> dict[str, Any]:
    """Run a variation and return its row; if it fails, a row with the error, `failed`."""
    recipe, row = task
    logging.disable_progress_bar()
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            results = run_variation(recipe, Path(folder))
    except Exception as error:  # such as a lack of memory; the other variations have their rows
        return {**row, "failed": f"{type(error).__name__}: {error}"}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {**row, **results, "seconds": round(time.monotonic() - began, 1), **provenance(device)}


if __name__ == "__main__":
    main()
