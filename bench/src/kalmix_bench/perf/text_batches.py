"""Random windows of real text, for training steps that are timed or checked."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from kalmix.training import corpus as text


def byte_tokens() -> Tensor:
    """Return the bytes of the training text, uint8."""
    return torch.frombuffer(bytearray(_training_text().encode()), dtype=torch.uint8)


def word_tokens(vocab_size: int) -> Tensor:
    """Return the words, spaces and signs of the training text as hashes from 0 to `vocab_size - 1`, int64.

    Their frequencies are those of a text, on which the time of an embedding's backward pass depends.
    """
    words = re.findall(r"\w+|\s+|[^\w\s]", _training_text())
    return torch.tensor([zlib.crc32(word.encode()) % vocab_size for word in words])


def batches(tokens: Tensor, length: int, batch: int, device: str) -> Iterator[Tensor]:
    """Yield random windows `[batch, length]` of `tokens`, int64, endlessly.

    Args:
        tokens: `[N]`, at least `length` + 1 tokens.
        length: tokens of a window.
        batch: windows.
        device: device of the result.
    """
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(tokens) - length, (batch,), generator=generator)
        yield torch.stack([tokens[start : start + length] for start in starts]).long().to(device)


def _training_text() -> str:
    return "\n".join(text.load_corpus().training)
