"""Which checkpoint to go on from: the newest that is whole."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

from safetensors import SafetensorError, safe_open

_NUMBERED = re.compile(r"checkpoint-(\d+)$")


def newest(folder: Path) -> Path | None:
    """The checkpoint of `folder` with the most steps that can be read; None if there is none.

    One that was cut off while it was written (a full disk, a pulled plug) is passed over with a warning.
    """
    found = [(int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := _NUMBERED.search(path.name))]
    for _, path in sorted(found, reverse=True):
        wrong = fault(path)
        if wrong is None:
            return path
        warnings.warn(f"passing over {path}: {wrong}", stacklevel=2)
    return None


def fault(path: Path) -> str | None:
    """What is wrong with a checkpoint or model folder, or None; reads headers and sizes, not every number."""
    for name in ("trainer_state.json", "config.json") if _NUMBERED.search(path.name) else ("config.json",):
        try:
            json.loads((path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return f"{name} is missing"
        except (OSError, ValueError) as error:
            return f"{name} is damaged ({error})"
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        return "it holds no weights (model.safetensors is missing)"
    for file in weights:
        try:
            with safe_open(file, framework="pt") as tensors:
                tensors.keys()
        except (OSError, SafetensorError) as error:
            return f"{file.name} is damaged ({error})"
    return None
