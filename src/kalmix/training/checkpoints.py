"""Checkpoints of a run: list them, check that they are intact, and choose the one to resume from.

A checkpoint has a manifest with the size and CRC-32 of every file, digests of the data that its run reads, and the
settings of its run. So a later change of recipe.json is detected.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kalmix.errors import ArgumentError, FormatError
from kalmix.files import FORMAT, check_format, read_json, write_text
from kalmix.training.recipe import RECIPE_FILE, Recipe

CHECKPOINTS = "checkpoints"  # folder of a run
MANIFEST_FILE = "manifest.json"
STATE_FILE = "trainer_state.json"  # of the Trainer, with its log
_CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)$")
_READ_SIZE = 1 << 24  # bytes


def run_of(path: Path) -> Path:
    """Return the folder of the run in which `path` is a checkpoint; `path` itself if it is a run.

    Args:
        path: folder of a run, or RUN/checkpoint-N, or RUN/checkpoints/checkpoint-N.
    """
    if _CHECKPOINT_NAME.fullmatch(path.name) is None or (path / RECIPE_FILE).exists():
        return path
    folder = path.parent if path.parent.name else path.absolute().parent
    return folder.parent if folder.name == CHECKPOINTS else folder


def is_checkpoint(path: Path) -> bool:
    """Return whether a path names a checkpoint of a run, as in `run_of`. The checkpoint may be missing."""
    run = run_of(path)
    return run != path and (run / RECIPE_FILE).exists()


def find_checkpoint(path: Path, argument: str) -> Path:
    """Return the folder of a checkpoint.

    Args:
        path: RUN/checkpoint-N or RUN/checkpoints/checkpoint-N.
        argument: name of the argument, for the error message.

    Raises:
        ArgumentError: there is no such checkpoint.
    """
    folder = run_of(path) / CHECKPOINTS
    if not (folder / path.name).is_dir():
        hint = "Other checkpoints were not saved or are deleted: see `keep_checkpoints` and `keep_steps`"
        names = ", ".join(path.name for path in reversed(list_checkpoints(folder))) or "a run with checkpoints"
        raise ArgumentError(argument, got=f"{str(path)!r}, which does not exist", expected=names, hint=hint)
    return folder / path.name


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first, complete or not."""
    paths = (path for path in folder.glob("checkpoint-*") if _CHECKPOINT_NAME.search(path.name))
    return sorted(paths, key=checkpoint_step, reverse=True)


def newest_checkpoint(folder: Path, *, processes: int | None = None) -> Path | None:
    """Return the newest intact checkpoint in a folder; `None` if there is none.

    Unfinished and damaged checkpoints are skipped with a warning.

    Args:
        folder: folder of checkpoints.
        processes: number of processes that must have saved the checkpoint; any by default.

    Raises:
        ArgumentError: a checkpoint lacks one of its files, or another number of processes saved it.
        FormatError: a newer version of kalmix wrote a checkpoint.
    """
    for path in list_checkpoints(folder):
        damage = find_damage(path, processes)
        if damage is None:
            return path
        warnings.warn(f"skipping {path}: {damage}", stacklevel=2)
    return None


def remove_checkpoints(folder: Path, keep_steps: int | None) -> None:
    """Delete the checkpoints of a finished run, except for those to branch from: see `Recipe.keep_steps`."""
    if keep_steps is None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in list_checkpoints(folder)[1:]:
        if checkpoint_step(path) % keep_steps:
            shutil.rmtree(path, ignore_errors=True)


def check_intact(checkpoint: Path, argument: str, needed: Callable[[str], bool] = lambda name: True) -> None:
    """Check that the files of a checkpoint are intact; reads the files that it checks.

    Args:
        checkpoint: folder of the checkpoint.
        argument: name of the argument, for the error message.
        needed: called with the name of a file; returns whether to check the file. Default: all files.

    Raises:
        ArgumentError: a checked file is damaged or missing, or the checkpoint is unfinished.
        FormatError: a newer version of kalmix wrote the checkpoint.
    """
    manifest, damage = _read_manifest(checkpoint)
    if damage is None:
        files = {name: fingerprint for name, fingerprint in manifest["files"].items() if needed(name)}
        missing = _missing(checkpoint, files)
        damage = f"it lacks {', '.join(missing)}" if missing else _find_damaged(checkpoint, files)
    if damage is not None:
        raise ArgumentError(argument, got=f"{str(checkpoint)!r}: {damage}", expected="an intact checkpoint")


def read_input_digests(checkpoint: Path) -> dict[str, str]:
    """Return the digests of the data that the run of a checkpoint had read."""
    return read_json(checkpoint / MANIFEST_FILE)["inputs"]


def read_settings(checkpoint: Path) -> Recipe:
    """Return the settings with which a checkpoint was saved. An older one lacks them: those of its run's recipe.json.

    Raises:
        ArgumentError: the settings in the manifest, or in recipe.json, cannot be read.
    """
    manifest = read_json(checkpoint / MANIFEST_FILE)
    if "recipe" not in manifest:
        return Recipe.load(run_of(checkpoint))
    try:
        return Recipe.from_json(manifest["recipe"], manifest["format"])
    except ArgumentError as error:
        got = f"{str(checkpoint)!r}, whose {MANIFEST_FILE} has unreadable settings ({error})"
        raise ArgumentError("checkpoint", got=got, expected="settings of a run") from None


def check_step_size(checkpoint: Path, processes: int, sequences: int) -> None:
    """Check that a step sees as many sequences as before, if another number of processes saved the checkpoint.

    Args:
        checkpoint: checkpoint to resume from.
        processes: number of processes that will train.
        sequences: sequences per optimizer step, of all processes.

    Raises:
        ArgumentError: a step would see another number of sequences.
    """
    manifest = read_json(checkpoint / MANIFEST_FILE)
    saved = manifest["processes"]
    if processes != saved and manifest.get("sequences") != sequences:
        expected = f"{saved}, the number that saved {str(checkpoint)!r}"
        hint = "A run with `batch_tokens` resumes on other numbers, too"
        raise ArgumentError("processes", got=processes, expected=expected, hint=hint)


def checkpoint_step(path: Path) -> int:
    """Return the training step of a checkpoint, from the name of its folder."""
    match = _CHECKPOINT_NAME.search(path.name)
    assert match is not None
    return int(match[1])


def write_manifest(
    checkpoint: Path, processes: int, sequences: int, inputs: dict[str, str], recipe: Recipe | None = None
) -> None:
    """Write the manifest of a checkpoint, its last file.

    Args:
        checkpoint: folder of the checkpoint.
        processes: number of processes that saved it.
        sequences: sequences per optimizer step, of all processes.
        inputs: digests of the data of its run.
        recipe: settings of its run; `None` for trainers without a `Recipe`.
    """
    files = {path.relative_to(checkpoint).as_posix(): _fingerprint(path) for path in _files(checkpoint)}
    counts = {"processes": processes, "sequences": sequences}
    written: dict[str, Any] = {"format": FORMAT, **counts, "inputs": inputs, "files": files}
    if recipe is not None:
        written["recipe"] = asdict(recipe)
    write_text(checkpoint / MANIFEST_FILE, json.dumps(written, indent=1) + "\n")


def renew_manifest(checkpoint: Path, inputs: dict[str, str], recipe: Recipe, changed: Sequence[str]) -> None:
    """Write the manifest of a checkpoint again, with which another run will begin.

    Args:
        checkpoint: folder of the checkpoint.
        inputs: digests of the data of that run.
        recipe: settings of that run.
        changed: names of the files that have changed.
    """
    manifest = read_json(checkpoint / MANIFEST_FILE)
    files = {**manifest["files"], **{name: _fingerprint(checkpoint / name) for name in changed}}
    written = {**manifest, "format": FORMAT, "inputs": inputs, "files": files, "recipe": asdict(recipe)}
    write_text(checkpoint / MANIFEST_FILE, json.dumps(written, indent=1) + "\n")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_FILE)


def _fingerprint(path: Path) -> list[int]:
    """Return the size and the CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(_READ_SIZE):
            checksum = zlib.crc32(block, checksum)
    return [path.stat().st_size, checksum]


def find_damage(checkpoint: Path, processes: int | None = None) -> str | None:
    """Return a description of the damage to a checkpoint; `None` if it is intact.

    Args:
        checkpoint: folder of the checkpoint.
        processes: number of processes that must have saved it; any by default.

    Raises:
        ArgumentError, FormatError: as `newest_checkpoint`.
    """
    manifest, damage = _read_manifest(checkpoint)
    if damage is not None:
        return damage
    if missing := _missing(checkpoint, manifest["files"]):
        got = f"{str(checkpoint)!r}, which lacks {', '.join(missing)}"
        hint = "Delete that folder to resume from an earlier checkpoint"
        raise ArgumentError("checkpoint", got=got, expected="a complete checkpoint", hint=hint)
    if processes not in (None, manifest["processes"]):
        expected = f"{manifest['processes']}, the number that saved {str(checkpoint)!r}"
        raise ArgumentError("processes", got=processes, expected=expected)
    return _find_damaged(checkpoint, manifest["files"])


def _read_manifest(checkpoint: Path) -> tuple[dict[str, Any], str | None]:
    """Return the manifest of a checkpoint, and a description of its damage: `None` if it has all entries."""
    if not (checkpoint / MANIFEST_FILE).exists():
        return {}, f"it is unfinished ({MANIFEST_FILE} is missing)"
    try:
        manifest = read_json(checkpoint / MANIFEST_FILE)
        check_format(manifest, checkpoint / MANIFEST_FILE, oldest=3)
        for entries in (manifest["files"], manifest["inputs"], manifest.get("recipe", {})):
            entries.items()  # raises if it is no object
        int(manifest["processes"])
    except FormatError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return {}, f"{MANIFEST_FILE} is damaged ({error})"
    return manifest, None


def _missing(checkpoint: Path, files: Iterable[str]) -> list[str]:
    """Return the names of missing files."""
    return [name for name in files if not (checkpoint / name).is_file()]


def _find_damaged(checkpoint: Path, files: Mapping[str, Any]) -> str | None:
    """Return a clause that names the files that differ from the manifest; `None` if all are intact."""
    damaged = [name for name, fingerprint in files.items() if _fingerprint(checkpoint / name) != fingerprint]
    return f"{', '.join(damaged)} {'is' if len(damaged) == 1 else 'are'} damaged" if damaged else None
