"""Measurements of generation: the time of each token, and the bytes that a cache holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer


class Clock(BaseStreamer):
    """Streamer of `generate` that notes the time of each token.

    Args:
        on_token: called with the number of tokens so far, 0 after the prompt.
    """

    def __init__(self, on_token: Callable[[int], object] = lambda token: None) -> None:
        self.times: list[float] = []
        self.on_token = on_token

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        self.on_token(len(self.times) - 1)

    def end(self) -> None:
        """Do nothing: the time of the last token is known."""


def held_bytes(root: Any) -> int:
    """Return the bytes of all tensors that an object holds, directly or through its attributes and elements."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in _tensors(root, set())}
    return sum(storages.values())


def _tensors(x: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, dict | list | tuple | set):
        for element in x.values() if isinstance(x, dict) else x:
            yield from _tensors(element, seen)
    elif hasattr(x, "__dict__") and not isinstance(x, type | nn.Module):
        yield from _tensors(vars(x), seen)
