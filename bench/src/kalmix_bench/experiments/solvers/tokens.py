"""Queries and keys of the studies: random, one key repeated, and keys correlated like a trained layer's."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad, silu

from kalmix.errors import unknown_name


class Tokens(NamedTuple):
    """Unit queries and keys `[n, T, D]` of n sequences, float64, and log-decays `[n, T]` if there is decay."""

    q: Tensor
    k: Tensor
    log_decay: Tensor | None = None


def draw(
    kind: str, sequences: int, length: int, width: int, seed: int, device: torch.device, *, with_decay: bool = False
) -> Tokens:
    """Draw tokens of a kind; they are the same on every device.

    Raises:
        ArgumentError: there is no such kind.
    """
    if kind not in KINDS:
        raise unknown_name("kind", kind, KINDS)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = (normalize(x, dim=-1).to(device) for x in KINDS[kind](normal, sequences, length, width))
    # median decay 0.98 per token; 0.88 to 0.997 within two standard deviations
    decay = torch.nn.functional.logsigmoid(4 + normal(sequences, length)).to(device) if with_decay else None
    return Tokens(q, k, decay)


Normal = Callable[..., Tensor]


def _random(normal: Normal, sequences: int, length: int, width: int) -> tuple[Tensor, Tensor]:
    """Draw normal queries and keys (section F)."""
    k = normal(sequences, length, width)
    return normal(sequences, length, width), k


def _repeated(normal: Normal, sequences: int, length: int, width: int) -> tuple[Tensor, Tensor]:
    """Draw one key per sequence and random queries: H has rank one, which gives the largest condition number."""
    k = normal(sequences, 1, width).expand(-1, length, -1)
    return normal(sequences, length, width), k


def _correlated(normal: Normal, sequences: int, length: int, width: int) -> tuple[Tensor, Tensor]:
    """Draw keys as a layer computes them from text: Zipf-distributed words, decaying features, convolution, SiLU.

    Word r of 1,000 has probability proportional to 1 / r; feature j of a word has standard deviation 1 / sqrt(j). Then
    follow a random projection, a mean over four tokens, and SiLU. Queries use another projection.
    """
    words, feature = 1000, torch.arange(1, width + 1, dtype=torch.float64)
    embedding = normal(words, width) / feature.sqrt()
    chances = (1 / torch.arange(1, words + 1, dtype=torch.float64)).cumsum(0)
    place = torch.special.ndtr(normal(sequences, length)) * chances[-1]
    x = embedding[torch.searchsorted(chances, place).clamp(max=words - 1)]
    x = normalize(x, dim=-1) * width**0.5

    def made(x: Tensor) -> Tensor:
        x = x @ normal(width, width) / width**0.5
        past = pad(x, (0, 0, 3, 0))
        return silu(sum((past[:, i : i + length] for i in range(4)), torch.zeros_like(x)) / 2)

    return made(x), made(x)


KINDS: dict[str, Callable[[Normal, int, int, int], tuple[Tensor, Tensor]]] = {
    "random": _random,
    "repeated": _repeated,
    "correlated": _correlated,
}
