"""Digests of the text and the tokenizer of a run. They are stored with a run, so that later changes are detected."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from kalmix.errors import ArgumentError, FileError
from kalmix.files import read_json, write_text
from kalmix.training.corpus import Corpus

INPUTS_FILE = "inputs.json"
Digests = dict[str, str]


def digests(corpus: Corpus, output: Path) -> Digests:
    """Return the digests of a corpus and of the tokenizer saved in `output`, by name."""
    text = _digest(*(part.encode() for documents in corpus for part in (f"{len(documents)}", *documents)))
    files = [output / "model" / name for name in ("tokenizer.json", "tokenizer_config.json")]
    return {"text": text, "tokenizer": _digest(*(file.read_bytes() if file.exists() else b"" for file in files))}


def save(output: Path, current: Digests) -> None:
    """Write inputs.json into the folder of a run."""
    write_text(output / INPUTS_FILE, json.dumps(current, indent=1) + "\n")


def load(output: Path) -> Digests | None:
    """Return the digests in the folder of a run; `None` if it has none.

    Raises:
        ArgumentError: inputs.json is damaged.
    """
    try:
        return read_json(output / INPUTS_FILE) if (output / INPUTS_FILE).exists() else None
    except FileError as error:
        hint = f"Delete {INPUTS_FILE} to skip this check"
        got = f"{str(output)!r}, whose {INPUTS_FILE} is damaged ({error})"
        raise ArgumentError("run", got=got, expected="the folder of a run", hint=hint) from None


def check(current: Digests, saved: Mapping[str, str], since: str, purpose: str, hint: str = "") -> None:
    """Check that text and tokenizer have not changed.

    Args:
        current: digests of the present text and tokenizer.
        saved: digests that were saved.
        since: time of saving, for the error message, such as "when 'runs/mine' was trained".
        purpose: reason for the check, such as "to resume the run".
        hint: advice for the error message.

    Raises:
        ArgumentError: the text or the tokenizer has changed.
    """
    for name, digest in current.items():
        if saved.get(name) != digest:
            raise ArgumentError(
                name, problem=f"is not the same as {since}", expected=f"unchanged data {purpose}", hint=hint
            )


def _digest(*parts: bytes) -> str:
    """Return the SHA-256 of a list of byte strings."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:".encode() + part)
    return digest.hexdigest()
