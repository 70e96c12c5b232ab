"""Folders of models: of a run, of a checkpoint of it, or of `save_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kalmix.errors import ArgumentError
from kalmix.training.checkpoints import check_intact, find_checkpoint, is_checkpoint, run_of
from kalmix.training.recipe import HISTORY, RECIPE_FILE, Recipe, resume_command

_SHARDED = "pytorch_model_fsdp*"  # pieces of weights; PyTorch can read them only by unpickling, which may run code
_EXPECTED = "a folder that `kalmix train` wrote (the run, a checkpoint, or its model)"


class ModelFolder(NamedTuple):
    """Folders with the files of a model; they differ for a checkpoint.

    Attributes:
        weights: folder with config.json and the weights.
        tokenizer: folder with tokenizer.json.
    """

    weights: Path
    tokenizer: Path

    def files(self) -> list[Path]:
        """Return the files on which the model's outputs depend: configuration, weights and tokenizer, by name."""
        weights = [x for x in self.weights.glob("*") if x.suffix == ".safetensors" or x.name == "config.json"]
        found = [*weights, self.tokenizer / "tokenizer.json"]
        return sorted((path for path in found if path.exists()), key=lambda path: path.name)


def find_intact_model(path: Path, argument: str = "model") -> ModelFolder:
    """Return the folders of a model, as `find_model`. Configuration and weights of a checkpoint are read and checked.

    Args:
        path: see `find_model`.
        argument: name of the argument, for error messages.

    Raises:
        ArgumentError: as `find_model`, or configuration or weights of a checkpoint are damaged.
    """
    found = find_model(path, argument)
    if is_checkpoint(path):
        check_intact(found.weights, argument, lambda name: name == "config.json" or ".safetensors" in name)
    return found


def find_model(path: Path, argument: str = "model") -> ModelFolder:
    """Return the folders of a model.

    Args:
        path: a run, RUN/checkpoint-N or RUN/checkpoints/checkpoint-N, or the folder of a model.
        argument: name of the argument, for error messages.

    Raises:
        ArgumentError: the folder is missing or holds no model; it is a run that was stopped before it saved its model;
            there is no such checkpoint, or its weights are in pieces.
    """
    if is_checkpoint(path):
        checkpoint = find_checkpoint(path, argument)
        if any(checkpoint.glob(_SHARDED)):
            got = f"{str(path)!r}, a checkpoint of a run with `fsdp`, whose weights are in pieces"
            hint = f"A run writes its model to {run_of(path) / 'model'} when it ends, also by Ctrl-C"
            raise ArgumentError(argument, got=got, expected="a checkpoint with whole weights", hint=hint)
        return ModelFolder(checkpoint, run_of(path) / "model")
    if not path.is_dir():
        raise ArgumentError(argument, problem=f"{str(path)!r} does not exist", expected=_EXPECTED)
    found = path / "model" if (path / "model").is_dir() else path
    run = path if (path / RECIPE_FILE).exists() else path.parent
    is_run = (run / RECIPE_FILE).exists() and found in (run, run / "model")
    if is_run and not (run / HISTORY).exists() and not (found / "config.json").exists():
        raise unfinished_run(argument, f"is {str(path)!r}, a run that is not finished and has saved no model", run)
    if not (found / "config.json").exists():
        raise ArgumentError(
            argument, got=f"{str(path)!r}, which holds no model (config.json is missing)", expected=_EXPECTED
        )
    return ModelFolder(found, found)


def unfinished_run(argument: str, problem: str, run: Path) -> ArgumentError:
    """Return the error for a run that has not ended, with the command that continues it.

    Args:
        argument: name of the argument.
        problem: description of the run, as in `ArgumentError`.
        run: folder of the run.
    """
    hint = f"Continue it with: {resume_command(Recipe.load(run), run)}"
    return ArgumentError(argument, problem=problem, expected="a finished run", hint=hint)
