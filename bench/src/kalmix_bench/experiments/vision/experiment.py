"""Experiment that trains small image classifiers: GKAVision, and the same backbone with other layers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kalmix.errors import ArgumentError
from kalmix.files import read_json
from kalmix.layers import MIXERS
from kalmix_bench.experiments.vision.recipe import DIGITS, HISTORY, WEIGHTS, VisionRecipe
from kalmix_bench.runner import options, session
from kalmix_bench.runner.cells import Results, Row, digest
from kalmix_bench.runner.experiment import Experiment, ProgressFn
from kalmix_bench.runner.paper_claims import Finding
from kalmix_bench.runner.published_names import published_name
from kalmix_bench.runner.scores import Score

PRESETS = {"laptop": DIGITS, "paper": VisionRecipe()}
MODELS = ("attention", *(name for name in MIXERS if name != "design"))


@dataclass(frozen=True)
class VisionCell:
    """One training run; the recipe defines the images, the mixer and the seed."""

    recipe: VisionRecipe

    def __str__(self) -> str:
        return f"{self.recipe.mixer}  seed {self.recipe.seed}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything that defines the cell."""
        return {"recipe": asdict(self.recipe)}


class Vision(Experiment[VisionCell]):
    """Experiment on image classifiers, trained on handwritten digits or a folder of images (section N of Gated
    KalmaNet).
    """

    name = "vision"
    keys = frozenset(("recipe", "accuracy"))
    in_all = False

    def commands(self) -> dict[str, Callable[..., None]]:
        return {"vision": _command}

    def run(
        self, cells: tuple[VisionCell, ...], results: Results, device: torch.device, on_progress: ProgressFn
    ) -> list[Row]:
        """Train a model, or resume it from its newest checkpoint; return its accuracy on the test images.

        Raises:
            ArgumentError: there are no images, or the loss diverged.
        """
        from kalmix_bench.experiments.vision.run import ProgressCallback, train

        (cell,) = cells
        folder = _folder(cell, results)
        if not self.is_complete(cell, results):
            (folder / HISTORY).unlink(missing_ok=True)
            train(
                cell.recipe,
                folder,
                resume=True,
                callbacks=[ProgressCallback(cell.recipe, on_progress)],
                cpu=device.type == "cpu",
            )
        history = read_json(folder / HISTORY, list)
        evaluated = [row["eval_accuracy"] for row in history if "eval_accuracy" in row]
        return [
            {
                "accuracy": evaluated[-1],
                "curves": {"loss": [row["loss"] for row in history if "loss" in row], "accuracy": evaluated},
                "training_seconds": round(history[-1]["train_runtime"], 2),
            }
        ]

    def is_complete(self, cell: VisionCell, results: Results) -> bool:
        return all((_folder(cell, results) / name).exists() for name in (WEIGHTS, HISTORY))

    def clear(self, cell: VisionCell, results: Results) -> None:
        shutil.rmtree(_folder(cell, results) / "checkpoints", ignore_errors=True)

    def report(self, rows: Sequence[Row], output: Path, console: Console) -> list[Path]:
        table = Table("model", box=box.MARKDOWN, title="[bold]accuracy on held-out images, %", title_justify="left")
        for column in ("images", "epochs", "seeds", "test accuracy", "seconds"):
            table.add_column(column, justify="right", no_wrap=column != "images")
        for recipe, group in _by_recipe(rows):
            seconds = sum(row["training_seconds"] for row in group) / len(group)
            accuracy = Score.of([row["accuracy"] for row in group])
            cells = (_images(recipe), recipe["epochs"], len(group), accuracy, f"{seconds:.1f}")
            table.add_row(recipe["mixer"], *map(str, cells))
        console.print(table)
        return [_draw_learning(_by_recipe(rows), output / "vision.png")] if rows else []

    def findings(self, rows: Sequence[Row]) -> list[Finding]:
        return [
            Finding(
                task=f"vision/{_images(recipe)}",
                condition=f"{recipe['size']} pixels, {recipe['epochs']} epochs",
                layer=recipe["mixer"],
                score="accuracy",
                value=Score.of([row["accuracy"] for row in group]),
                seeds=len(group),
                metadata={"width": recipe["width"], "depth": sum(recipe["depths"]), "epochs": recipe["epochs"]},
            )
            for recipe, group in _by_recipe(rows)
        ]


def _folder(cell: VisionCell, results: Results) -> Path:
    return results.path.parent / "models" / digest(cell)


def _by_recipe(rows: Sequence[Row]) -> list[tuple[dict[str, Any], list[Row]]]:
    """Group rows whose recipes differ only in the seed."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        same = json.dumps({**row["recipe"], "seed": None}, sort_keys=True)
        groups.setdefault(same, []).append(row)
    return [(group[0]["recipe"], group) for group in groups.values()]


def _draw_learning(groups: Sequence[tuple[dict[str, Any], list[Row]]], path: Path) -> Path:
    """Draw test accuracy and training loss by epoch, a row of panels per data set."""
    from kalmix_bench.runner.line_panels import LinePanel, draw_line_panels, seed_curve

    panels = []
    for images in dict.fromkeys(_images(recipe) for recipe, _ in groups):
        models = [(recipe, group) for recipe, group in groups if _images(recipe) == images]
        for name, label, factor in (("accuracy", "test accuracy (%)", 100), ("loss", "training loss (nats)", 1)):
            curves = {
                published_name(recipe["mixer"]): seed_curve([row["curves"][name] for row in group], factor)
                for recipe, group in models
            }
            subtitle = f"{models[0][0]['size']} pixels, mean and standard error over {len(models[0][1])} seeds"
            panels.append(LinePanel(images, subtitle, "epoch", label, curves))
    return Path(draw_line_panels(path, panels, columns=2))


def _images(recipe: dict[str, Any]) -> str:
    return "digits" if recipe["images"] is None else Path(recipe["images"]).name


def _command(
    preset: Annotated[
        str, typer.Option(help="laptop: a minute per model, on digits. paper: the published recipe, for GPUs.")
    ] = "laptop",
    images: Annotated[
        Path | None,
        typer.Option(help="Folder with train and val, each with one subfolder per class. Default: the digits."),
    ] = None,
    models: Annotated[str, typer.Option(help="Mixers to train, by name.")] = "attention,gated-kalmanet",
    seeds: options.Seeds = 1,
    epochs: Annotated[int | None, typer.Option(help="Epochs of the cosine. Default: the preset's.")] = None,
    jobs: options.Jobs = 1,
    device: options.Device = None,
    commit: options.Commit = None,
    output: Annotated[Path, typer.Option(help="Output folder; finished runs in it are skipped.")] = Path("runs/vision"),
) -> None:
    """Train image classifiers (section N of Gated KalmaNet): GKAVision and the same backbone with other mixers."""
    recipe = options.preset(preset, PRESETS)
    if images is None and preset == "paper":
        raise ArgumentError("images", problem="is not given", expected="a folder of images for preset paper")
    if images is not None and not images.is_dir():
        raise ArgumentError("images", got=repr(str(images)), expected="a folder with the subfolders train and val")
    if jobs > 1 and recipe.workers:  # daemon processes of jobs cannot start data loading workers
        raise ArgumentError("jobs", got=jobs, expected=f"1 for preset {preset}, which loads images in worker processes")
    recipe = replace(
        recipe,
        images=None if images is None else str(images.resolve()),
        epochs=recipe.epochs if epochs is None else epochs,
    )
    model_names = options.names("models", models, MODELS)
    seed_range = range(options.count("seeds", seeds))
    cells = [VisionCell(replace(recipe, mixer=mixer, seed=seed)) for mixer in model_names for seed in seed_range]
    session.run(Vision(commit), cells, output, Console(highlight=False), device=options.device(device), jobs=jobs)
