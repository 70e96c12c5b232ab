"""Fixtures: a small corpus and its shards."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kalmix.training.shards import Manifest, Preparation, prepare, tokenize_part
from kalmix.training.shards.manifest import INDEX_SUFFIX

WORDS = [f"{a}{b}" for a in ("fil", "be", "ev", "pro") for b in ("ter", "lief", "idence", "cess", " noise")]


def texts(count: int, seed: int = 0, most: int = 60) -> list[str]:
    """Return documents of 1 to `most` words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, most))) + f" {n}" for n in range(count)]


def write_corpus(folder: Path, documents: list[str]) -> Path:
    """Write each document as a text file."""
    folder.mkdir(parents=True)
    for number, text in enumerate(documents):
        (folder / f"{number:04}.txt").write_text(text, newline="")
    return folder


def shard_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of the shards and of the manifest."""
    patterns = ("*.ds", f"*.ds{INDEX_SUFFIX}", "manifest.json")
    return {path.name: path.read_bytes() for pattern in patterns for path in folder.glob(pattern)}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts", texts(300))


@pytest.fixture(scope="session")
def prepared(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    """Return the folder and the manifest of several shards of the corpus."""
    folder = tmp_path_factory.mktemp("shards") / "shards"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(tokenize_part, "_BATCH_DOCUMENTS", 16)
        return folder, prepare(Preparation(str(corpus), vocab_size=300, held_out=0.1, shard_tokens=2000), folder)
