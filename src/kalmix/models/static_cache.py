"""Cache layers for transformers whose tensors keep their addresses: `generate(cache_implementation="static")`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

from kalmix.errors import ArgumentError
from kalmix.layers import Mixer
from kalmix.models.cache import LAYER_TYPE, BeliefLayer
from kalmix.models.cache_entry import CacheEntry
from kalmix.models.cache_name import CACHE_NAME
from kalmix.models.segments_from_inputs import InputLayout
from kalmix.models.state_tensors import Structure, flatten, rebuild
from kalmix.rings import as_rings_like, empty_history, in_order
from kalmix.steps import Slots
from kalmix.types import Belief
from kalmix.validation import can_check_values


class StaticBeliefLayer(BeliefLayer, StaticLayer):
    """Layer of a `StaticCache` that stores the state of one mixer in buffers, which calls update in place.

    The first call allocates the buffers. A state of constant size has buffers of that size. A history, which stores
    past tokens, has one slot for each of `max_cache_len` tokens, or for each token of the mixer's window. If the mixer
    steps in place, its history is a ring: the token at position p is in slot p mod S of S slots. Values are stored
    without autograd history. Last tokens cannot be removed; use `snapshot` and `restore`.

    Args:
        max_cache_len: maximum number of tokens of a sequence, padding included.

    Attributes:
        in_place: whether mixers that can do so update the buffers in decoding steps, instead of returning a state that
            is copied into them; `capture_decoding` sets it.
        rings: whether histories are rings, as `kalmix.steps.attend` expects them.
        rows: indices of the buffers' rows, int32 `[N]`; `None` before the first such step.
        tensors: buffers; without meaning unless `is_initialized`.
        structure: structure of the state; `None` if there are no buffers yet.
        window: window of the mixer.
    """

    _layer_type = LAYER_TYPE
    is_compileable = True
    is_croppable = False
    supports_early_init = False

    def __init__(self, max_cache_len: int, **kwargs: Any) -> None:
        StaticLayer.__init__(self, max_cache_len, **kwargs)
        self.record_past: bool = False
        self.mixer: str | None = None
        self.window: int | None = None
        self.in_place: bool = False
        self.rings: bool = False
        self.rows: Tensor | None = None
        self.tensors: list[Tensor] = []
        self.structure: Structure = None

    @property
    def entry(self) -> CacheEntry:
        """Copy of the contents."""
        if not self.is_initialized:
            return CacheEntry()
        state = rebuild([x.clone() for x in self.tensors], self.structure)
        return CacheEntry(self._in_order(state), int(self.cumulative_length), mixer=self.mixer)

    def set_entry(self, value: CacheEntry) -> None:
        """Copy the contents of a layer into the buffers.

        Args:
            value: contents of a layer whose buffers have the same shapes.

        Raises:
            ArgumentError: the shapes differ.
        """
        if value.tokens:
            self._fill(as_rings_like(value.state, value.state) if self.rings else value.state)
        self.is_initialized = value.tokens > 0
        self.mixer = value.mixer
        self.cumulative_length.fill_(value.tokens)

    def accepts(self, entry: CacheEntry) -> bool:
        """Return whether the buffers exist and have the sizes of an entry's state, apart from the first axis."""
        if not entry.tokens:
            return True
        same_kind = self.structure is not None and super().accepts(entry) and not entry.stale
        return same_kind and _row_shapes(entry.state) == _row_shapes(rebuild(self.tensors, self.structure))

    def allocate(self, mixer: Mixer, batch: int, dtype: torch.dtype) -> None:
        """Allocate the buffers before the first call. Compiled with CUDA graphs, that call must not allocate them.

        Args:
            mixer: mixer of the layer.
            batch: number of sequences.
            dtype: dtype of the mixer's input.
        """
        self.window, self.rings = mixer.window, mixer.steps_in_place
        device = next(mixer.parameters()).device
        with torch.no_grad():
            _, prior = mixer(torch.zeros(batch, 0, mixer.hidden_size, dtype=dtype, device=device))
        self._clear(prior)

    def get_state(self, mixer: Mixer) -> Belief | None:
        """Return the contents, with the tokens of histories in order; `None` for the prior of `mixer`.

        Raises:
            ArgumentError: the buffers are those of another mixer.
        """
        pool = self.get_pool(mixer)
        return None if pool is None else self._in_order(pool)

    def get_pool(self, mixer: Mixer) -> Belief | None:
        """Return the buffers, in which a step updates the state; `None` before the first token.

        Raises:
            ArgumentError: the buffers are those of another mixer.
        """
        self.bind(mixer)
        self.window, self.rings = mixer.window, mixer.steps_in_place
        return rebuild(self.tensors, self.structure) if self.is_initialized else None

    def count_as(self, other: BeliefLayer) -> None:
        """Count as many tokens as another layer; the mixer of this one is on another rank."""
        self.cumulative_length.fill_(other.get_seq_length())
        self.is_initialized = True

    def step_slots(self, mixer: Mixer, x: Tensor) -> Slots | None:
        """Return the rows of the buffers as slots, if the mixer updates them in place for one token of each row."""
        steps = self.in_place and mixer.steps_in_place and x.shape[1] == 1 and not torch.is_grad_enabled()
        if not steps or not self.is_initialized or x.shape[0] != self.tensors[0].shape[0]:
            return None
        if self.rows is None or len(self.rows) != len(x):
            self.rows = torch.arange(len(x), dtype=torch.int32, device=x.device)
        return Slots(self.rows, self.rows)

    def set_state(self, state: Belief, mixer_input: Tensor, layout: InputLayout) -> Tensor | None:
        """Copy the state after a call of the mixer that started from `get_state` into the buffers.

        Args:
            state: state after the call.
            mixer_input: `[B, T, D]`, input of the mixer in that call.
            layout: sequences in the input.

        Returns:
            The counter of tokens, if the mixer has updated the buffers itself: the caller adds 1 to it in place.
            Otherwise `None`, and the tokens are counted.

        Raises:
            ArgumentError: there are more than `max_cache_len` tokens. On a GPU, or compiled, a history instead writes
                to an index that is out of range, or loses the oldest tokens if it is a ring.
        """
        added, length = mixer_input.shape[1], self.cumulative_length
        if can_check_values(length) and int(length) + added > self.max_cache_len:
            problem = f"stores at most {self.max_cache_len} tokens"
            raise ArgumentError(CACHE_NAME, problem=problem, expected=f"max_cache_len >= {int(length) + added}")
        continued = self.is_initialized
        if not continued:
            self._clear(state)
            self.is_initialized = True
        with torch.no_grad():
            if all(x is buffer for x, buffer in zip(flatten(state)[0], self.tensors, strict=False)):
                return length
            _store(rebuild(self.tensors, self.structure), state, self.window, continued, self.rings)
            self.cumulative_length.add_(added)
        return None

    def crop(self, tokens_to_remove: int) -> None:
        """Raise `ArgumentError`, unless `tokens_to_remove` is 0."""
        if int(tokens_to_remove):
            expected = "0 (a static cache keeps no past; use a dynamic one, or `snapshot` and `restore`)"
            raise ArgumentError("tokens_to_remove", got=int(tokens_to_remove), expected=expected)

    def get_seq_length(self) -> Any:
        """Return the number of tokens seen, padding included: 0, or an int64 scalar tensor."""
        return self.cumulative_length if self.is_initialized else 0

    def get_max_length(self) -> int:
        """Return the maximum number of tokens."""
        return self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and the offset of a mask over all tokens."""
        return self.max_cache_len, 0

    def _in_order(self, state: Any) -> Any:
        """Return a state whose histories have their tokens in order: a copy if a ring may have begun again."""
        return in_order(state) if self.rings and self.window is not None else state

    def _clear(self, state: Any) -> None:
        """Set all buffers to 0 and empty histories; allocate them if they do not have the shapes for `state`."""
        self.cumulative_length = self.cumulative_length.to(flatten(state)[0][0].device)
        self._fill(_empty(state, self.max_cache_len + 1 if self.window is None else self.window))

    def _fill(self, state: Any) -> None:
        """Set all buffers to a state; allocate them if they have other shapes."""
        tensors, structure = flatten(state)
        if structure != self.structure or [x.shape for x in tensors] != [x.shape for x in self.tensors]:
            self.tensors, self.structure = [torch.empty_like(x) for x in tensors], structure
            if not torch.compiler.is_compiling():  # CUDA graphs need to know that the addresses do not change
                for x in (*self.tensors, self.cumulative_length):
                    torch._dynamo.mark_static_address(x)
        for buffer, x in zip(self.tensors, tensors, strict=True):
            buffer.copy_(x)


def _empty(state: Any, slots: int) -> Any:
    """Return new tensors like those of a state, in which each history has `slots` slots, all empty."""
    if isinstance(state, Tensor):
        return torch.zeros_like(state, memory_format=torch.contiguous_format)
    if not hasattr(state, "positions"):
        return type(state)(*(_empty(x, slots) for x in state))
    return empty_history(state, slots)


def _store(buffers: Any, state: Any, window: int | None, continued: bool, rings: bool) -> None:
    """Copy a state into buffers.

    A history that fills its window is copied. Otherwise its tokens are written to the slots after their positions. So
    slots stay in the order of positions, and slot 0 is empty; padding, whose position is -1, is written there.

    In rings, tokens are written to the slots of their positions, modulo the number of slots. Padding is written to the
    last slot: it has no token if a sequence has fewer tokens than slots, and otherwise there is no padding.

    Args:
        buffers: result of `_empty`.
        state: state of the same type.
        window: number of slots of a history with a window.
        continued: whether a history begins with the slots of the buffers, followed by new tokens.
        rings: whether histories are rings.
    """
    if isinstance(buffers, Tensor):
        if state.device.type == "cpu" and torch.compiler.is_compiling():
            # Fix the layout: in others, compiled sums over the state write beyond their output (pytorch issue 196681).
            state = state.contiguous().as_strided(state.shape, buffers.stride())
        buffers.copy_(state)
        return
    if hasattr(buffers, "positions"):
        slots = buffers.positions.shape[1]
        fills_window = slots == window == state.positions.shape[1]
        if rings or not fills_window:
            new = type(state)(*(x[:, slots:] for x in state)) if continued and not fills_window else state
            sequence = torch.arange(new.positions.shape[0], device=new.positions.device)[:, None]
            index = new.positions % slots if rings else new.positions + 1
            for buffer, x in zip(buffers, new, strict=True):
                buffer[sequence, index] = x.to(buffer.dtype)
            return
    for buffer, x in zip(buffers, state, strict=True):
        _store(buffer, x, window, continued, rings)


def _row_shapes(state: Any) -> list[torch.Size]:
    """Return the shapes of all tensors of a state without their first axis."""
    return [x.shape[1:] for x in flatten(state)[0]]
