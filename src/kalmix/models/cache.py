"""Beliefs in the cache of transformers: constant in size, and able to take tokens back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, StaticLayer

from kalmix.beliefs import loadable
from kalmix.errors import ArgumentError
from kalmix.layers import Mixer
from kalmix.segments import Segments, segments_without_checks
from kalmix.types import Belief

LAYER_TYPE = "kalmix_belief"


@loadable
class CachedCall(NamedTuple):
    """One call of a mixer: the state before it, and what it was given."""

    initial_state: Any  # a Belief or None; see `Filtered`
    mixer_input: Tensor
    segments: Segments | None

    def truncate(self, tokens: int) -> CachedCall:
        """The same call with only its first tokens."""
        segments = self.segments
        if segments is not None:
            segments = segments_without_checks(
                torch.cat([segments.rows[:, :1], segments.rows[:, 1:].clamp(max=tokens)], dim=1)
            )
        return CachedCall(self.initial_state, self.mixer_input[:, :tokens], segments)

    def take(self, index: Tensor) -> CachedCall:
        """The same call for the batch rows `index`, where each row is one sequence."""
        segments = self.segments
        if segments is not None:
            row = torch.arange(len(index), dtype=torch.int32, device=index.device)
            segments = segments_without_checks(torch.cat([row[:, None], segments.rows[index, 1:]], dim=1))
        return CachedCall(_take(self.initial_state, index), self.mixer_input.index_select(0, index), segments)


def _take(state: Belief | None, index: Tensor) -> Belief | None:
    return None if state is None else state.take(index)


@loadable
class CacheEntry(NamedTuple):
    """All a cache layer holds; immutable, so keeping one is a snapshot.

    Attributes:
        state: the mixer's state after all tokens, unless `stale`.
        tokens: how many tokens have passed, padding included.
        calls: the last call, or all since the last crop where the cache records its past.
        stale: whether `state` must first be filtered again from the last of `calls`.
        drop_calls: whether a crop said that all before the next call will stay.
    """

    state: Any = None  # a Belief; see `Filtered`
    tokens: int = 0
    calls: tuple[CachedCall, ...] = ()
    stale: bool = False
    drop_calls: bool = False

    def take(self, index: Tensor) -> CacheEntry:
        """The sequences `index`, in that order."""
        return self._replace(state=_take(self.state, index), calls=tuple(call.take(index) for call in self.calls))


class BeliefLayer(CacheLayerMixin):
    """One layer's memory in a `DynamicCache`. `get_state` before a mixer's call, `set_state` after it.

    `crop` needs no token-by-token history: it goes back to the state before the call that is cut and filters what is
    kept of it again, when next requested. So tokens of the last call can always be taken back, and all tokens since the
    last crop while `record_past` is set, as transformers does for speculative decoding.
    """

    _layer_type = LAYER_TYPE
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.entry: CacheEntry = CacheEntry()
        self.record_past: bool = False

    def get_state(self, mixer: Mixer) -> Belief | None:
        """The state to continue from."""
        if self.entry.stale:
            call = self.entry.calls[-1]
            _, state = mixer(call.mixer_input, call.initial_state, call.segments)
            self.entry = self.entry._replace(state=state, stale=False)
        return self.entry.state

    def set_state(self, state: Belief, mixer_input: Tensor, segments: Segments | None) -> None:
        """Take over the state after a call that began where `get_state` left off."""
        entry = self.entry
        earlier = entry.calls if self.record_past and not entry.drop_calls else ()
        call = CachedCall(entry.state, mixer_input, segments)
        self.entry = CacheEntry(state, entry.tokens + mixer_input.shape[1], (*earlier, call))
        self.is_initialized = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens; a positive number is how many to keep, as on older versions.

        Raises:
            ArgumentError: that is further back than the layer remembers.
        """
        requested, entry = int(tokens_to_remove), self.entry
        remove = min(-requested, entry.tokens) if requested <= 0 else max(0, entry.tokens - requested)
        if remove and remove == entry.tokens:
            self.reset()
            return
        state, calls, stale, left = entry.state, entry.calls, entry.stale, remove
        while left:
            if not calls:
                expected = f"at most {remove - left} tokens back (activate_past_recording() before, to go back further)"
                raise ArgumentError("tokens_to_remove", got=requested, expected=expected)
            *before, call = calls
            length = call.mixer_input.shape[1]
            stale, state = left < length, call.initial_state
            calls = (*before, call.truncate(length - left)) if stale else tuple(before)
            left -= min(left, length)
        self.entry = CacheEntry(state, entry.tokens - remove, calls, stale, drop_calls=True)

    def reset(self) -> None:
        """Back to the prior."""
        self.entry = CacheEntry()
        self.is_initialized = False

    def activate_past_recording(self) -> None:
        """Remember every call from here to the next crop."""
        self.record_past = True

    def get_seq_length(self) -> int:
        """Tokens seen, padding included."""
        return self.entry.tokens

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of a mask over all tokens."""
        return self.entry.tokens + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The sequences `beam_idx`, in that order."""
        if self.entry.calls:
            self.entry = self.entry.take(beam_idx.to(self.entry.calls[-1].mixer_input.device))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences `indices` (int64, or a mask)."""
        self.reorder_cache(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times."""
        if self.entry.calls:
            self.reorder_cache(torch.arange(self.entry.calls[-1].mixer_input.shape[0]).repeat_interleave(repeats))

    def offload(self) -> None:
        """Beliefs are small: they stay where they are."""

    def prefetch(self) -> None:
        """See `offload`."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: beliefs arrive whole."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: this layer holds beliefs, not keys and values."""
        raise TypeError("a belief is not a pair of keys and values: use `get_state` and `set_state`")


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


def snapshot(cache: Cache) -> tuple[CacheEntry, ...]:
    """What `cache` holds now; nothing is copied, as beliefs are immutable. Give it to `restore` to roll back."""
    return tuple(layer.entry for layer in belief_layers(cache, len(cache.layers)))


def restore(cache: Cache, entries: tuple[CacheEntry, ...]) -> None:
    """Put `cache` back to where `snapshot` found it."""
    for layer, entry in zip(belief_layers(cache, len(entries)), entries, strict=True):
        layer.entry = entry
        layer.is_initialized = entry.tokens > 0
