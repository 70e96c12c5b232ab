"""Beliefs in the cache of transformers: constant in size, and able to take tokens back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, StaticLayer

from kalmix.beliefs import loadable
from kalmix.errors import ArgumentError
from kalmix.layers import Mixer
from kalmix.segments import Segments, unchecked
from kalmix.types import Belief

LAYER_TYPE = "kalmix_belief"


@loadable
class Call(NamedTuple):
    """One call of a mixer: the state before it, and what it was given."""

    before: Any  # a Belief or None; see `Filtered`
    signal: Tensor
    segments: Segments | None

    def first(self, tokens: int) -> Call:
        """The same call with only its first tokens."""
        segments = self.segments
        if segments is not None:
            segments = unchecked(torch.cat([segments.rows[:, :1], segments.rows[:, 1:].clamp(max=tokens)], dim=1))
        return Call(self.before, self.signal[:, :tokens], segments)

    def take(self, index: Tensor) -> Call:
        """The same call for the batch rows `index`, where each row is one sequence."""
        segments = self.segments
        if segments is not None:
            row = torch.arange(len(index), dtype=torch.int32, device=index.device)
            segments = unchecked(torch.cat([row[:, None], segments.rows[index, 1:]], dim=1))
        return Call(_take(self.before, index), self.signal.index_select(0, index), segments)


def _take(state: Belief | None, index: Tensor) -> Belief | None:
    return None if state is None else state.take(index)


@loadable
class Memory(NamedTuple):
    """All a cache layer holds; immutable, so keeping one is a snapshot.

    Attributes:
        state: the mixer's state after all tokens, unless `stale`.
        tokens: how many tokens have passed, padding included.
        calls: the last call, or all since the last crop where the cache records its past.
        stale: whether `state` must first be filtered again from the last of `calls`.
        settled: whether a crop said that all before the next call will stay.
    """

    state: Any = None  # a Belief; see `Filtered`
    tokens: int = 0
    calls: tuple[Call, ...] = ()
    stale: bool = False
    settled: bool = False

    def take(self, index: Tensor) -> Memory:
        """The sequences `index`, in that order."""
        return self._replace(state=_take(self.state, index), calls=tuple(call.take(index) for call in self.calls))


class BeliefLayer(CacheLayerMixin):
    """One layer's memory in a `DynamicCache`. `recall` before a mixer's call, `remember` after it.

    `crop` needs no token-by-token history: it goes back to the state before the call that is cut and filters what is
    kept of it again, when next asked. So tokens of the last call can always be taken back, and all tokens since the
    last crop while `record_past` is set, as transformers does for speculative decoding.
    """

    _layer_type = LAYER_TYPE
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.memory: Memory = Memory()
        self.record_past: bool = False

    def recall(self, mixer: Mixer) -> Belief | None:
        """The state to continue from."""
        if self.memory.stale:
            call = self.memory.calls[-1]
            _, state = mixer(call.signal, call.before, call.segments)
            self.memory = self.memory._replace(state=state, stale=False)
        return self.memory.state

    def remember(self, state: Belief, signal: Tensor, segments: Segments | None) -> None:
        """Take over the state after a call that began where `recall` left off."""
        memory = self.memory
        kept = memory.calls if self.record_past and not memory.settled else ()
        call = Call(memory.state, signal, segments)
        self.memory = Memory(state, memory.tokens + signal.shape[1], (*kept, call))
        self.is_initialized = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens; a positive number is how many to keep, as on older versions.

        Raises:
            ArgumentError: that is further back than the layer remembers.
        """
        asked, memory = int(tokens_to_remove), self.memory
        remove = min(-asked, memory.tokens) if asked <= 0 else max(0, memory.tokens - asked)
        if remove and remove == memory.tokens:
            self.reset()
            return
        state, calls, stale, left = memory.state, memory.calls, memory.stale, remove
        while left:
            if not calls:
                expected = f"at most {remove - left} tokens back (activate_past_recording() before, to go back further)"
                raise ArgumentError("tokens_to_remove", got=asked, expected=expected)
            *before, call = calls
            length = call.signal.shape[1]
            stale, state = left < length, call.before
            calls = (*before, call.first(length - left)) if stale else tuple(before)
            left -= min(left, length)
        self.memory = Memory(state, memory.tokens - remove, calls, stale, settled=True)

    def reset(self) -> None:
        """Back to the prior."""
        self.memory = Memory()
        self.is_initialized = False

    def activate_past_recording(self) -> None:
        """Remember every call from here to the next crop."""
        self.record_past = True

    def get_seq_length(self) -> int:
        """Tokens seen, padding included."""
        return self.memory.tokens

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of a mask over all tokens."""
        return self.memory.tokens + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The sequences `beam_idx`, in that order."""
        if self.memory.calls:
            self.memory = self.memory.take(beam_idx.to(self.memory.calls[-1].signal.device))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences `indices` (int64, or a mask)."""
        self.reorder_cache(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times."""
        if self.memory.calls:
            self.reorder_cache(torch.arange(self.memory.calls[-1].signal.shape[0]).repeat_interleave(repeats))

    def offload(self) -> None:
        """Beliefs are small: they stay where they are."""

    def prefetch(self) -> None:
        """See `offload`."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: beliefs arrive whole."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: this layer holds beliefs, not keys and values."""
        raise TypeError("a belief is not a pair of keys and values: use `recall` and `remember`")


class StaticBeliefLayer(StaticLayer):
    """What a static cache builds for kalmix: an error that says what to use instead."""

    _layer_type = LAYER_TYPE

    def __init__(self, **kwargs: Any) -> None:
        raise ArgumentError("cache_implementation", got="static", expected="dynamic (beliefs have constant size)")


def belief_layers(cache: Cache | None, count: int) -> list[BeliefLayer]:
    """The layers of `cache`, filled up with new ones if it is empty.

    Raises:
        ArgumentError: the cache was made for another model.
    """
    if cache is None:
        return []
    if not cache.layers:
        cache.layers.extend(BeliefLayer() for _ in range(count))
    layers = [layer for layer in cache.layers if isinstance(layer, BeliefLayer)]
    if len(layers) != len(cache.layers) or len(layers) != count:
        kinds = sorted({type(layer).__name__ for layer in cache.layers})
        expected = f"a DynamicCache(config=model.config) with {count} belief layers"
        raise ArgumentError(
            "past_key_values", problem=f"has {len(cache.layers)} layers of {', '.join(kinds)}", expected=expected
        )
    return layers


def snapshot(cache: Cache) -> tuple[Memory, ...]:
    """What `cache` holds now; nothing is copied, as beliefs are immutable. Give it to `restore` to roll back."""
    return tuple(layer.memory for layer in belief_layers(cache, len(cache.layers)))


def restore(cache: Cache, memories: tuple[Memory, ...]) -> None:
    """Put `cache` back to where `snapshot` found it."""
    for layer, memory in zip(belief_layers(cache, len(memories)), memories, strict=True):
        layer.memory = memory
        layer.is_initialized = memory.tokens > 0
