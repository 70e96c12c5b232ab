"""Cache layers for transformers that store beliefs, and on request what is needed to remove the last tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kalmix.errors import ArgumentError
from kalmix.layers import DesignLayer, Mixer
from kalmix.models.blocks import BlockOutput
from kalmix.models.cache_entry import CachedCall, CacheEntry
from kalmix.models.cache_name import CACHE_NAME
from kalmix.models.segments_from_inputs import InputLayout
from kalmix.models.state_tensors import Structure, flatten, rebuild, with_exact_times
from kalmix.steps import Slots
from kalmix.types import Belief, replace_fields

# accelerate refuses types with "linear_attention" in their name under its sequence parallelism, where each rank would
# start again.
LAYER_TYPE = "kalmix_linear_attention"


class BeliefLayer(CacheLayerMixin):
    """Layer of a `DynamicCache` that stores the state of one mixer. A model makes these layers: see `cache.layers`.

    The model calls `get_state(mixer)` before a mixer, and `set_state(state, mixer_input, layout)` after it. The layer
    keeps only the newest state. After `activate_past_recording()`, which transformers calls for speculative decoding,
    it also keeps the inputs of all calls until a crop. `crop(-n)` removes the last n of these tokens, `crop(n)` all but
    the first n. If it cuts a call in two, the next `get_state` starts from the state before that call and filters the
    kept tokens again. Tokens that a crop has kept can be removed until the next call. `crop` of all tokens resets the
    layer, recorded or not.

    Args:
        kwargs: options that transformers passes to every cache layer; ignored.

    Attributes:
        entry: the contents as one immutable `CacheEntry`, with the state as `state`. Assign it to set the contents.
        tokens: number of tokens seen, padding included; also `get_seq_length()`.
        tensors: list of the tensors of the state; empty before the first call.
        structure: structure of the state, see `kalmix.models.state_tensors`; `None` before the first call.
        calls: recorded calls, a tuple of `CachedCall`.
        stale: whether the next `get_state` must filter tokens again.
        drop_calls: whether the next `set_state` discards `calls`, because a crop has accepted their tokens.
        mixer: name of the mixer (its class, or its design in a `DesignLayer`); `None` before the first call.
        record_past: whether calls are recorded.

    Raises:
        ArgumentError: `crop` would remove some tokens that were not recorded, or a layer with tokens is used by another
            mixer.
        TypeError: `update` is called: the layer has no keys and values.

    Example:
        >>> from kalmix.models import KalmixConfig, KalmixForCausalLM
        >>> config = KalmixConfig(vocab_size=64, hidden_size=32, layers=["kla"])
        >>> cache = KalmixForCausalLM(config).eval()(torch.randint(64, (1, 10))).cache
        >>> type(cache.layers[0]).__name__, cache.layers[0].entry.tokens
        ('BeliefLayer', 10)
    """

    _layer_type = LAYER_TYPE
    remote = False  # whether the mixer is on another rank, and this layer counts tokens only
    is_croppable = True
    is_sliding = False
    supports_early_init = False
    tensors: list[Tensor]
    structure: Structure
    tokens: int
    calls: tuple[CachedCall, ...]
    stale: bool
    drop_calls: bool
    mixer: str | None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.record_past: bool = False
        self.set_entry(CacheEntry())

    @property
    def entry(self) -> CacheEntry:
        """Contents of the layer."""
        state = None if self.structure is None else rebuild(self.tensors, self.structure)
        return CacheEntry(state, self.tokens, self.calls, self.stale, self.drop_calls, self.mixer)

    def set_entry(self, value: CacheEntry) -> None:
        """Replace the contents of the layer.

        This is not a property setter: compiled with torch 2.11, one runs after the code that follows it.
        """
        state, self.tokens, self.calls, self.stale, self.drop_calls, self.mixer = value
        self.tensors, self.structure = ([], None) if state is None else flatten(state)

    def accepts(self, entry: CacheEntry) -> bool:
        """Return whether an entry may belong to this layer: mixer and structure of its state are the same, if known."""
        if entry.state is None or self.structure is None:
            return True
        same_mixer = None in (self.mixer, entry.mixer) or self.mixer == entry.mixer
        return same_mixer and flatten(entry.state)[1] == self.structure

    def get_state(self, mixer: Mixer) -> Belief | None:
        """Return the state from which the next call of `mixer` continues; `None` for its prior.

        Filters the tokens that a crop left of its last call again, if there was one.

        Raises:
            ArgumentError: the state is one of another mixer.
        """
        self.bind(mixer)
        if self.stale:
            call = self.calls[-1]
            _, state = mixer(call.mixer_input, call.initial_state, call.layout.segments)
            self.set_entry(replace_fields(self.entry, state=state, stale=False))
        return self.entry.state

    def bind(self, mixer: Mixer) -> None:
        """Store the name of the mixer; raise `ArgumentError` if the layer has tokens of one of another name."""
        name = mixer.design.name if isinstance(mixer, DesignLayer) else type(mixer).__name__
        if self.is_initialized and self.mixer not in (None, name):
            problem, expected = f"has a state of {self.mixer}", f"a cache of this model, with a state of {name}"
            raise ArgumentError(CACHE_NAME, problem=problem, expected=expected)
        self.mixer = name
        if self.structure is not None:
            self.tensors = with_exact_times(self.tensors, self.structure)

    def set_state(self, state: Belief, mixer_input: Tensor, layout: InputLayout) -> Tensor | None:
        """Store the state after a call of the mixer that started from `get_state`, and count its tokens.

        Args:
            state: state after the call.
            mixer_input: `[B, T, D]`, input of the mixer in that call.
            layout: sequences in the input.

        Returns:
            `None`: there is no counter left to increase.
        """
        entry, calls = self.entry, ()
        if self.record_past:
            *earlier, last = (None,) if entry.drop_calls or not entry.calls else entry.calls
            call = CachedCall(entry.state, mixer_input, layout)
            calls = (call,) if last is None else (*earlier, *last.join(call))
        self.set_entry(CacheEntry(state, entry.tokens + mixer_input.shape[1], calls, mixer=entry.mixer))
        self.tensors = [_owned(x) for x in self.tensors]
        self.is_initialized = True

    def count_as(self, other: BeliefLayer) -> None:
        """Count as many tokens as another layer; the mixer of this one is on another rank."""
        self.tokens, self.remote = other.tokens, True

    def step_slots(self, mixer: Mixer, x: Tensor) -> Slots | None:
        """Return `None`: states are not updated in place."""

    def get_pool(self, mixer: Mixer) -> Belief | None:
        """Return the tensors that a step updates: the state."""
        return self.get_state(mixer)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens.

        Args:
            tokens_to_remove: minus the number of tokens to remove; 0 removes none. A positive number is the number of
                tokens to keep, as in older versions of transformers.

        Raises:
            ArgumentError: the layer has not recorded so many tokens.
        """
        requested, entry = int(tokens_to_remove), self.entry
        remove = min(-requested, entry.tokens) if requested <= 0 else max(0, entry.tokens - requested)
        if remove and remove == entry.tokens:
            self.reset()
            return
        if self.remote:
            self.tokens -= remove
            return
        state, calls, stale, left = entry.state, entry.calls, entry.stale, remove
        while left:
            if not calls:
                expected = f"at most {remove - left} tokens (call activate_past_recording() earlier to remove more)"
                raise ArgumentError("tokens_to_remove", got=requested, expected=expected)
            *before, call = calls
            length = call.mixer_input.shape[1]
            stale, state = left < length, call.initial_state
            calls = (*before, call.truncate(length - left)) if stale else tuple(before)
            left -= min(left, length)
        tokens = entry.tokens - remove
        self.set_entry(CacheEntry(state, tokens, calls, stale, drop_calls=True, mixer=entry.mixer))

    def reset(self) -> None:
        """Return to the prior."""
        self.set_entry(CacheEntry())
        self.is_initialized = False

    def activate_past_recording(self) -> None:
        """Keep every call from now to the next crop."""
        self.record_past = True

    def get_seq_length(self) -> int:
        """Return the number of tokens seen, padding included."""
        return self.tokens

    def get_max_length(self) -> int:
        """Return -1: the length is not limited."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and the offset of a mask over all tokens."""
        return self.tokens + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select the sequences `beam_idx` (int64 `[M]`), in that order."""
        if self.is_initialized:
            self.set_entry(self.entry.take(beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select the sequences `indices`: int64 `[M]`, or a bool mask."""
        self.reorder_cache(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times."""
        if self.is_initialized:
            self.reorder_cache(torch.arange(self.entry.sequences).repeat_interleave(repeats))

    def offload(self) -> None:
        """Do nothing: beliefs are small and stay on their device."""

    def prefetch(self) -> None:
        """Do nothing; see `offload`."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: `set_state` brings complete states."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Raise `TypeError`: the layer stores a belief, not keys and values."""
        raise TypeError("a belief is not a pair of keys and values; use `get_state` and `set_state`")


def _owned(x: Tensor) -> Tensor:
    """Return a contiguous tensor that is no view of a larger one, such as all projections of a prompt."""
    x = x.contiguous()  # one layout for compiled code
    view = not torch.compiler.is_compiling() and x.untyped_storage().nbytes() > x.nbytes
    return x.clone() if view else x


class CacheOfCall(NamedTuple):
    """Layers of a cache during one call of a model; a `StateCache`.

    Attributes:
        layers: one per block.
        layout: sequences in the input of the call.
        counters: counters of tokens that `finish` increases.
    """

    layers: list[BeliefLayer]
    layout: InputLayout
    counters: list[Tensor]

    def get_state(self, index: int, mixer: Mixer, slots: Slots | None = None) -> Belief | None:
        """Return the state from which the mixer of a block continues, or the pool of `slots`; `None` for its prior."""
        layer = self.layers[index]
        return layer.get_state(mixer) if slots is None else layer.get_pool(mixer)

    def slots(self, index: int, mixer: Mixer, x: Tensor) -> Slots | None:
        """Return the slots in which the mixer of a block updates the state in place; `None` if it returns a new one."""
        return None if self.layout.segments is not None else self.layers[index].step_slots(mixer, x)

    def set_state(self, index: int, output: BlockOutput) -> None:
        """Store the state of the mixer after a call of its block."""
        assert output.state is not None and output.mixer_input is not None
        counter = self.layers[index].set_state(output.state, output.mixer_input, self.layout)
        if counter is not None:
            self.counters.append(counter)

    def finish(self) -> None:
        """Count the tokens of a step in place, in one kernel for all layers."""
        if self.counters:
            torch._foreach_add_(self.counters, 1)


def belief_layers(cache: Cache | None, count: int, name: str = CACHE_NAME) -> list[BeliefLayer]:
    """Return the layers of a cache. An empty cache first gets `count` new layers.

    Args:
        cache: cache of transformers; `None` returns no layers.
        count: number of blocks of the model.
        name: argument that holds the cache, for messages.

    Raises:
        ArgumentError: the cache has another number of layers, or layers of another kind.
    """
    if cache is None:
        return []
    if not cache.layers:
        cache.layers.extend(BeliefLayer() for _ in range(count))
    layers = [layer for layer in cache.layers if isinstance(layer, BeliefLayer)]
    if len(layers) != len(cache.layers) or len(layers) != count:
        kinds = sorted({type(layer).__name__ for layer in cache.layers})
        expected = f"a DynamicCache(config=model.config) with {count} belief layers"
        raise ArgumentError(name, problem=f"has {len(cache.layers)} layers of {', '.join(kinds)}", expected=expected)
    return layers


def _check_cache(cache: object) -> None:
    if not isinstance(cache, Cache):
        got = f"a {type(cache).__name__}"
        raise ArgumentError("cache", got=got, expected="a cache, as in the output of an earlier call")


def snapshot(cache: Cache) -> tuple[CacheEntry, ...]:
    """Return the contents of a cache, to pass to `restore` later.

    Later calls of the model do not change the snapshot. For a dynamic cache, the default, no tensor is copied: each
    call stores new states in the cache and does not write to the old ones. The states of a `StaticCache` are copied,
    because calls write to its tensors.

    Args:
        cache: cache that a `KalmixForCausalLM` returned.

    Returns:
        One entry per block, with the block's state and number of tokens, for `restore` only. A `DynamicCache()` that no
        model has used gives `()`, which `restore` does not accept once the cache has been used. To return to an empty
        cache, build it as `DynamicCache(config=model.config)`.

    Raises:
        ArgumentError: `cache` is not a cache of transformers, or another model has filled it.

    Example:
        >>> from kalmix.models import KalmixConfig, KalmixForCausalLM, restore, snapshot
        >>> config = KalmixConfig(vocab_size=64, hidden_size=32, layers=["kla", "kla"])
        >>> model = KalmixForCausalLM(config).eval()
        >>> cache = model(torch.randint(64, (1, 10))).cache
        >>> saved = snapshot(cache)
        >>> _ = model(torch.randint(64, (1, 5)), cache=cache)
        >>> restore(cache, saved)
        >>> cache.get_seq_length()
        10
    """
    _check_cache(cache)
    return tuple(layer.entry for layer in belief_layers(cache, len(cache.layers), "cache"))


def restore(cache: Cache, entries: tuple[CacheEntry, ...]) -> None:
    """Set a cache back to the contents that `snapshot` returned. It changes the cache in place and returns nothing.

    The next call of the model then continues after the tokens that the cache had at the time of the snapshot.

    Args:
        cache: the cache that was passed to `snapshot`, or another one of the same model: a `DynamicCache`, used or new,
            also for a snapshot of a `StaticCache`; or a `StaticCache` that a call of the model has filled. The tensors
            of a `StaticCache` must have the shapes of the snapshot apart from the number of sequences. So layers that
            store tokens, such as attention, need a snapshot of a `StaticCache` with the same `max_cache_len`.
        entries: result of `snapshot`; it may be restored any number of times. The number of sequences may differ from
            that in the cache; the next call of the model needs as many as the snapshot.

    Raises:
        ArgumentError: `cache` is not a cache of a `KalmixForCausalLM`, `entries` is not a result of `snapshot`, their
            numbers of layers differ, or a layer has a state of another mixer or, in a `StaticCache`, of another shape.
            The cache is not changed then. With a `DynamicCache`, a state of another shape raises `ArgumentError` in the
            next call of the model; so does a state of another mixer, if the cache was new. Weights and options of the
            mixer are not compared.

    Example:
        >>> from kalmix.models import KalmixConfig, KalmixForCausalLM, restore, snapshot
        >>> config = KalmixConfig(vocab_size=64, hidden_size=32, layers=["kla", "kla"])
        >>> model = KalmixForCausalLM(config).eval()
        >>> cache = model(torch.randint(64, (1, 10))).cache
        >>> saved, question = snapshot(cache), torch.randint(64, (1, 5))
        >>> first = model(question, cache=cache).logits
        >>> restore(cache, saved)
        >>> torch.allclose(model(question, cache=cache).logits, first)
        True
    """
    _check_cache(cache)
    if not isinstance(entries, tuple | list) or not all(isinstance(entry, CacheEntry) for entry in entries):
        raise ArgumentError("entries", got=f"a {type(entries).__name__}", expected="the result of `snapshot`")
    if cache.layers and len(entries) != len(cache.layers):
        expected = f"{len(cache.layers)}, one for each layer of the cache"
        raise ArgumentError("entries", problem=f"has {len(entries)} entries", expected=expected)
    pairs = list(zip(belief_layers(cache, len(entries), "cache"), entries, strict=True))
    if not all(layer.accepts(entry) for layer, entry in pairs):
        raise ArgumentError("entries", problem="belong to another cache", expected="a snapshot of a cache like `cache`")
    for layer, entry in pairs:
        layer.set_entry(entry)
        layer.is_initialized = entry.tokens > 0
