"""Fixtures: a small text, and a tiny model trained by the command line."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from kalmix.cli import main

SMALL = [
    "--layers",
    "kla,attention",
    "--hidden-size",
    "8",
    "--seq-len",
    "16",
    "--batch-size",
    "2",
    "--vocab-size",
    "280",
]


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "small.txt"
    draw = random.Random(0)
    words = [f"{a}{b}" for a in ("fil", "be", "ev", "pro") for b in ("ter", "lief", "idence", "cess", " noise")]
    path.write_text("\n\n".join(" ".join(draw.choices(words, k=40)) for _ in range(60)))
    return path


@pytest.fixture(scope="session")
def run_folder(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(
        sys, "argv", ["kalmix", "train", "--text", str(text_file), *SMALL, "--steps", "5", "--output", str(folder)]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    monkeypatch.undo()
    assert not ended.value.code
    return folder
