"""Text and token shards for the tests of language models."""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kalmix.training.shards import Preparation, prepare

WORDS = [
    "".join(syllables) for syllables in product(("ka", "lo", "mi", "nu"), ("ber", "dan", "fil", "gos"), ("e", "s"))
]
DOCUMENTS, LENGTH = 200, 600  # of words


@pytest.fixture(scope="session")
def word_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JSON lines of documents of random words, about one token a word."""
    path, draw = tmp_path_factory.mktemp("texts") / "0.jsonl", random.Random(0)
    texts = (" ".join(draw.choices(WORDS, k=LENGTH)) for _ in range(DOCUMENTS))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="session")
def word_shards(word_texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards of `word_texts`, with a tokenizer of 512 tokens."""
    folder = tmp_path_factory.mktemp("shards")
    prepare(Preparation(str(word_texts), vocab_size=512, held_out=0.05), folder)
    return folder


@pytest.fixture
def diverging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models whose losses are not finite."""
    from kalmix.models import KalmixForCausalLM  # imports transformers

    forward = KalmixForCausalLM.forward

    def diverge(self: Any, *args: Any, **options: Any) -> Any:
        output = forward(self, *args, **options)
        output.loss = output.loss * float("nan")
        return output

    monkeypatch.setattr(KalmixForCausalLM, "forward", diverge)
