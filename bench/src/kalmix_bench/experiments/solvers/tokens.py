"""Keys and queries to study: random ones, one key over and over, and keys as correlated as a trained layer's."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad, silu

from kalmix.errors import ArgumentError


class Tokens(NamedTuple):
    """Unit queries and keys `[n, T, D]` of n independent sequences, float64, and log-decays `[n, T]` if they forget."""

    q: Tensor
    k: Tensor
    log_decay: Tensor | None = None


def draw(
    kind: str, sequences: int, length: int, width: int, seed: int, device: torch.device, *, with_decay: bool = False
) -> Tokens:
    """Tokens of a kind, the same on every device.

    Raises:
        ArgumentError: there is no such kind.
    """
    if kind not in KINDS:
        raise ArgumentError("kind", got=repr(kind), expected=f"one of {', '.join(KINDS)}")
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = (normalize(x, dim=-1).to(device) for x in KINDS[kind](normal, sequences, length, width))
    # a decay of 0.98 a token in the middle, from 0.88 to 0.997 within two standard deviations
    decay = torch.nn.functional.logsigmoid(4 + normal(sequences, length)).to(device) if with_decay else None
    return Tokens(q, k, decay)


Normal = Callable[..., Tensor]


def _random(normal: Normal, sequences: int, length: int, width: int) -> tuple[Tensor, Tensor]:
    """Section F: both normal."""
    k = normal(sequences, length, width)
    return normal(sequences, length, width), k


def _repeated(normal: Normal, sequences: int, length: int, width: int) -> tuple[Tensor, Tensor]:
    """One key for a whole sequence, random queries: H has rank one, which is the worst there is."""
    k = normal(sequences, 1, width).expand(-1, length, -1)
    return normal(sequences, length, width), k


def _correlated(normal: Normal, sequences: int, length: int, width: int) -> tuple[Tensor, Tensor]:
    """As a layer makes them of text: words by Zipf's law, features of decaying strength, convolution, SiLU.

    Word number r of 1,000 comes with probability proportional to 1 / r; feature j of a word has standard deviation
    1 / sqrt(j); a random projection, a mean over four tokens, SiLU. Queries are made in the same way by another
    projection.
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
