"""Prefill of long inputs in chunks of columns, so that memory does not grow with their length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kalmix.distributed.context import is_active
from kalmix.layers.base import Mixer
from kalmix.models.cache import BeliefLayer
from kalmix.models.cache_entry import JOINED_TOKENS

PREFILL_TOKENS = 32768  # tokens of all rows that a call filters at a time, if no state grows without bound
MULTIPLE = 64  # columns of a chunk are a multiple of this, at least this
LONG = 2**30  # tokens after which the state of a layer with a window has its largest size


def prefill_bounds(
    given: Tensor, cache_layers: Sequence[BeliefLayer], mixers: Sequence[Mixer], tokens: int | None
) -> list[int]:
    """Return the columns at which a call cuts its input into chunks, the first and the end included.

    There is one chunk if gradients are on, without a cache, in compiled code and under context parallelism. Otherwise a
    chunk has about `tokens` tokens of all rows. If the cache records the past, the last tokens are a chunk of their
    own: speculative decoding removes some of them, and the cache then filters only this chunk again.

    Args:
        given: input `[B, T, ...]`.
        cache_layers: layers of the cache; empty if there is none.
        mixers: mixers of the model.
        tokens: `config.prefill_tokens`.
    """
    batch, length = given.shape[:2]
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not cache_layers:
        return [0, length]
    if length <= MULTIPLE or is_active():
        return [0, length]
    if tokens is None and all(mixer.state_size(LONG) == mixer.state_size(2 * LONG) for mixer in mixers):
        tokens = PREFILL_TOKENS
    end = length - JOINED_TOKENS if any(layer.record_past for layer in cache_layers) else length
    columns = end if tokens is None else max(MULTIPLE, tokens // max(1, batch) // MULTIPLE * MULTIPLE)
    chunks = -(-end // columns)
    size = -(-end // (chunks * MULTIPLE)) * MULTIPLE
    return sorted({*range(0, end, size), end, length})
