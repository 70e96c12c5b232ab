"""Rows of `kalmix bench perf decode`: models, kinds of cache, batches and prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kalmix_bench.perf.models.protocol import MODELS, PEERS, ModelCell, ModelSize

# "dynamic" and "static" are of `generate(cache_implementation=...)`; transformers compiles the model for "static".
# "captured" replays a CUDA graph of each step: `kalmix.models.capture_decoding`.
CACHES = ("dynamic", "static", "captured")
WITHOUT_STATIC_CACHE = ("fla gated-deltanet", "fla kda")


@dataclass(frozen=True)
class DecodeCell(ModelCell):
    """One row: a model that continues `size.batch_size` prompts of `size.seq_len` tokens by `steps` tokens.

    `mode` is the kind of cache, and `size.dtype` the dtype of the weights.
    """

    modes: ClassVar[tuple[str, ...]] = CACHES

    def __str__(self) -> str:
        return f"{self.model}, {self.mode}, {self.size.batch_size} x {self.size.seq_len}"


def make_cells(
    names: list[str], modes: list[str], sizes: list[ModelSize], origin: tuple[int, str, str | None]
) -> list[DecodeCell]:
    """Return the rows, the smallest prompts first, without caches that a model does not have.

    Args:
        names: models.
        modes: kinds of cache.
        sizes: batches and prompts.
        origin: new tokens, hardware and commit.
    """
    return [
        DecodeCell(name, mode, size, *origin)
        for size in sizes
        for mode in modes
        for name in names
        if mode == "dynamic" or name not in (WITHOUT_STATIC_CACHE if mode == "static" else PEERS)
    ]


__all__ = ["CACHES", "MODELS", "DecodeCell", "make_cells"]
