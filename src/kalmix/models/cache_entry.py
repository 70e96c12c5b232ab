"""Contents of a cache layer: the state of one mixer, and on request the calls from which it can be computed again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.beliefs import loadable
from kalmix.models.segments_from_inputs import InputLayout
from kalmix.models.state_tensors import flatten
from kalmix.types import Belief, replace_fields

JOINED_TOKENS = 64  # tokens of joined calls; a rollback filters at most so many again


@loadable
class CachedCall(NamedTuple):
    """Inputs of one call of a mixer, enough to repeat it.

    Attributes:
        initial_state: state of the mixer before the call; `None` for its prior.
        mixer_input: `[B, T, D]`, input of the mixer.
        layout: sequences in the input.
    """

    initial_state: Any  # a Belief or None; see `Filtered`
    mixer_input: Tensor
    layout: InputLayout

    def join(self, later: CachedCall) -> tuple[CachedCall, ...]:
        """Return this call and the next as one, if both are short and without padding, otherwise both.

        So drafted tokens share one initial state, which for attention is as large as all keys and values.
        """
        layouts = (*self.layout, *later.layout)
        if (
            any(x is not None for x in layouts)
            or self.mixer_input.shape[1] + later.mixer_input.shape[1] > JOINED_TOKENS
        ):
            return self, later
        return (replace_fields(self, mixer_input=torch.cat([self.mixer_input, later.mixer_input], dim=1)),)

    def truncate(self, tokens: int) -> CachedCall:
        """Return the call with only its first `tokens` tokens."""
        return CachedCall(self.initial_state, self.mixer_input[:, :tokens], self.layout.truncate(tokens))

    def take(self, index: Tensor) -> CachedCall:
        """Return the call for the batch rows `index` (int64 `[M]`); each row must be one sequence."""
        mixer_input = self.mixer_input.index_select(0, index)
        return CachedCall(_take(self.initial_state, index), mixer_input, self.layout.take(index))


def _take(state: Belief | None, index: Tensor) -> Belief | None:
    return None if state is None else state.take(index)


@loadable
class CacheEntry(NamedTuple):
    """Contents of a cache layer. It is immutable, so a reference to it is a snapshot.

    Attributes:
        state: state of the mixer after all tokens; valid unless `stale`.
        tokens: number of tokens seen, padding included.
        calls: all calls since the last crop, if the layer records the past; otherwise empty.
        stale: the state must be computed again, from the last of `calls`.
        drop_calls: the next `set_state` discards `calls`, because a crop has accepted the tokens before it.
        mixer: name of the mixer that computed the state: its class, or its design in a `DesignLayer`.
    """

    state: Any = None  # a Belief; see `Filtered`
    tokens: int = 0
    calls: tuple[CachedCall, ...] = ()
    stale: bool = False
    drop_calls: bool = False
    mixer: str | None = None

    def take(self, index: Tensor) -> CacheEntry:
        """Return the entry of the sequences `index` (int64 `[M]`), in that order."""
        index = index.to(self._tensor.device)
        return replace_fields(
            self, state=_take(self.state, index), calls=tuple(call.take(index) for call in self.calls)
        )

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return self._tensor.shape[0]

    @property
    def _tensor(self) -> Tensor:
        """A tensor of the entry, whose first axis is sequences."""
        return self.calls[-1].mixer_input if self.state is None else flatten(self.state)[0][0]
