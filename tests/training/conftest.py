"""A text, token shards, and recipes that train in a second."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kalmix.training import Recipe
from kalmix.training.shards import Preparation, prepare

WORDS = ["the", "filter", "of", "a", "belief", "that", "decays", "is", "evidence", "for", "what", "comes", "next", "in"]


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "small.txt"
    draw = random.Random(0)
    path.write_text("\n\n".join(" ".join(draw.choices(WORDS, k=40)) for _ in range(60)))
    return path


@pytest.fixture
def recipe(text_file: Path):
    def make(**changes) -> Recipe:
        small = {
            "layers": ({"mixer": "kla", "slots": 4},),
            "vocab_size": 280,
            "hidden_size": 8,
            "seq_len": 16,
            "batch_size": 2,
            "eval_tokens": 64,
        }
        return Recipe(**{"text": str(text_file), **small, "steps": 8, **changes})

    return make


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    (folder / "corpus").mkdir()
    for n in range(120):
        text = " ".join(WORDS[(n * k + k) % len(WORDS)] for k in range(5 + n % 30))
        (folder / "corpus" / f"{n}.txt").write_text(f"{n} {text}")
    prepare(Preparation(str(folder / "corpus"), vocab_size=280, held_out=0.1), folder / "shards")
    return folder / "shards"


@pytest.fixture
def small(shards: Path):
    def make(**changes) -> Recipe:
        layers = ({"mixer": "kla", "slots": 4},)
        sizes = {"vocab_size": 288, "hidden_size": 8, "seq_len": 32, "batch_size": 2, "eval_tokens": 128}
        return Recipe(**{"shards": str(shards), "layers": layers, **sizes, "steps": 6, **changes})

    return make
