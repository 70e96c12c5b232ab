"""Folder of results: finished tasks are stored one by one, and kept when the evaluation is repeated."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kalmix.errors import ArgumentError, FileError
from kalmix.files import FORMAT, check_format, read_json, write_text
from kalmix.training.model_folder import ModelFolder

RESULTS_FILE = "results.json"


class Results:
    """Scores of one model, in the file results.json of a folder.

    Args:
        folder: output folder.
        settings: settings that scores depend on. A file with other settings is refused.

    Attributes:
        settings: the settings.
        tasks: record of each finished unit by its key, for JSON.

    Raises:
        ArgumentError: the file is damaged, or has other settings.
        FormatError: a newer version of kalmix wrote it.

    Example:
        >>> from pathlib import Path
        >>> from kalmix.evaluation.results import Results
        >>> results = Results(Path("out"), {"limit": 10})
        >>> results.add("piqa", {"scores": {"acc": 0.5}})
        >>> Results(Path("out"), {"limit": 10}).tasks
        {'piqa': {'scores': {'acc': 0.5}}}
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder: Path = folder
        self.settings: dict[str, Any] = dict(settings)
        self.tasks: dict[str, dict[str, Any]] = {}
        path = folder / RESULTS_FILE
        if not path.exists():
            return
        try:
            found = read_json(path)
            check_format(found, path)
            tasks, known = found.get("tasks"), found.get("settings")
            if not isinstance(tasks, dict) or not isinstance(known, dict):
                raise FileError(f"{path.name} is damaged (it has no tasks or settings)")
        except FileError as error:
            expected = "a folder that `kalmix eval` wrote, or a new one"
            raise ArgumentError("output", problem=f"{str(folder)!r}: {error}", expected=expected) from None
        for name, value in self.settings.items():
            if known.get(name) != value:
                problem = f"{str(folder)!r} has results with {name} {known.get(name)!r}"
                hint = "Choose another --output"
                raise ArgumentError("output", problem=problem, expected=f"{name} {value!r}", hint=hint)
        self.tasks = tasks

    def add(self, key: str, record: Mapping[str, Any]) -> None:
        """Store the record of a finished unit; the file is replaced atomically."""
        self.tasks[key] = dict(record)
        contents = {"format": FORMAT, "settings": self.settings, "tasks": self.tasks}
        write_text(self.folder / RESULTS_FILE, json.dumps(contents, indent=1) + "\n")


def fingerprint(folder: ModelFolder) -> str:
    """Return the SHA-256 of the configuration, weights and tokenizer of a model."""
    digest = hashlib.sha256()
    for path in folder.files():
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.name}:{content}\n".encode())
    return digest.hexdigest()
