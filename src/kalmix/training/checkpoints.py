"""Checkpoints: which are there, whether they are intact, and which one a run resumes from.

A checkpoint has a manifest: size and CRC-32 of every file, and digests of the data that its run reads.
"""

from __future__ import annotations

import json
import re
import warnings
import zlib
from pathlib import Path

from kalmix.errors import ArgumentError, FormatError
from kalmix.files import FORMAT, check_format, read_json, write_text

MANIFEST = "manifest.json"
_NUMBERED = re.compile(r"checkpoint-(\d+)$")
_BLOCK = 1 << 24  # bytes read at once


def saved(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, newest first, complete or not."""
    return sorted((path for path in folder.glob("checkpoint-*") if _NUMBERED.search(path.name)), key=number)[::-1]


def newest(folder: Path, *, processes: int = 1) -> Path | None:
    """Return the newest intact checkpoint of `folder`; None if there is none.

    Pass over unfinished and damaged ones with a warning.

    Args:
        folder: of checkpoints.
        processes: that will train; as many as saved it.

    Raises:
        ArgumentError: a checkpoint lacks a file that it had, belongs to another number of processes, or was written by
            a newer version.
    """
    for path in saved(folder):
        damage = _damage(path, processes)
        if damage is None:
            return path
        warnings.warn(f"passing over {path}: {damage}", stacklevel=2)
    return None


def inputs_of(checkpoint: Path) -> dict[str, str]:
    """Return the digests of the data that a checkpoint's run had read."""
    return read_json(checkpoint / MANIFEST)["inputs"]


def number(path: Path) -> int:
    """Return the step of a checkpoint."""
    match = _NUMBERED.search(path.name)
    assert match is not None
    return int(match[1])


def write_manifest(checkpoint: Path, processes: int, inputs: dict[str, str]) -> None:
    """Complete a checkpoint by its manifest."""
    files = {path.relative_to(checkpoint).as_posix(): _contents(path) for path in _files(checkpoint)}
    written = {"format": FORMAT, "processes": processes, "inputs": inputs, "files": files}
    write_text(checkpoint / MANIFEST, json.dumps(written, indent=1) + "\n")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def _contents(path: Path) -> list[int]:
    """Return a file's size and CRC-32."""
    found = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found = zlib.crc32(block, found)
    return [path.stat().st_size, found]


def _damage(checkpoint: Path, processes: int) -> str | None:
    """Return what is damaged in a checkpoint, or None.

    Raises:
        ArgumentError: as `newest` does.
    """
    if not (checkpoint / MANIFEST).exists():
        return f"it is unfinished ({MANIFEST} is missing)"
    try:
        manifest = read_json(checkpoint / MANIFEST)
        check_format(manifest, checkpoint / MANIFEST)
        files, savers = dict(manifest["files"]), manifest["processes"]
        dict(manifest["inputs"])
    except FormatError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{MANIFEST} is damaged ({error})"
    missing = [name for name in files if not (checkpoint / name).is_file()]
    if missing:
        expected = "complete; delete that folder to resume from an earlier checkpoint"
        raise ArgumentError("checkpoint", got=f"{str(checkpoint)!r}, without {', '.join(missing)}", expected=expected)
    if savers != processes:
        expected = f"{savers}, as when {str(checkpoint)!r} was saved"
        raise ArgumentError("processes", got=processes, expected=expected)
    damaged = [name for name, contents in files.items() if _contents(checkpoint / name) != contents]
    return f"{', '.join(damaged)} {'is' if len(damaged) == 1 else 'are'} damaged" if damaged else None
