"""Part of all layers that decodes one token for each row of a batch, in place on a pool of states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix.distributed.tensor_parallel import HeadSharding
from kalmix.errors import ArgumentError
from kalmix.rings import as_rings, as_rings_like, find_history, in_order
from kalmix.steps import Slots, store_rows
from kalmix.validation import can_check_values, check_positive_int


class SteppedLayer(HeadSharding):
    """Base class of `Mixer` that adds steps: decoding over a pool of states, as `kalmix.steps` describes it.

    A layer that can step in place overrides `read_step`. Other layers filter copies of the states.
    """

    @property
    def steps_in_place(self) -> bool:
        """Whether `step` updates slots in place instead of filtering copies of the states."""
        return type(self).read_step is not SteppedLayer.read_step

    def state_pool(self, count: int, tokens: int | None = None) -> Any:
        """Return a pool of states for `step`: the layer's state, whose first axis is slots, with the prior in each.

        If the state stores past tokens, a slot has room for a number of them: the token at position p of its sequence
        is at index p modulo this number.

        Args:
            count: number of slots. With 1, it is the state to store for a sequence that starts.
            tokens: largest number of tokens of a sequence, for layers that store past tokens; others ignore it. A slot
                never has room for more than the `window` of the layer. Default: the window.

        Raises:
            ArgumentError: `tokens` is not a positive integer, or is absent for a layer that stores all past tokens.

        Example:
            >>> from kalmix.layers import Attention, GatedDeltaNet
            >>> pool = GatedDeltaNet(64, heads=2, head_dim=8).state_pool(8)
            >>> pool.belief.mean.shape, pool.conv_state.shape
            (torch.Size([8, 2, 8, 16]), torch.Size([8, 3, 64]))
            >>> Attention(64, heads=2).state_pool(8, tokens=100).keys.shape
            torch.Size([8, 100, 2, 32])
        """
        layer: Any = self
        weight = next(self.parameters())
        if tokens is not None:
            check_positive_int("tokens", tokens)
        with torch.no_grad():
            _, prior = layer(weight.new_zeros(1, 0, layer.hidden_size))
        if find_history(prior) is not None:
            sizes = [size for size in (tokens, layer.window) if size is not None]
            if not sizes:
                expected = f"the largest number of tokens of a sequence, since {type(self).__name__} stores all of them"
                raise ArgumentError("tokens", got=None, expected=expected)
            prior = as_rings(prior, min(sizes))
        return prior.take(torch.zeros(count, dtype=torch.int64, device=weight.device))

    def step(self, x: Tensor, pool: Any, slots: Slots) -> Tensor:
        """Filter one token for each row of a batch, in place on a pool of states. It has no gradients.

        The output of a row is that of `layer(x, state)` with the state in the slot that the row reads; the new state is
        stored in the slot that it writes. `kalmix.steps` describes slots and what a step does not check. Layers whose
        op has a step update their slots in place: the memory layers, `KLA`, `AdaptiveFilterAttention`,
        `ControlledFilter` and `AFATransformerBlock`; so does `Attention`. The others filter copies of the states.

        A slot is full when it stores as many tokens as it has room for, and the layer has no window, or a longer one.
        Where values are checked (see `kalmix.checks`), a step that reads such a slot raises an error. Elsewhere the
        token replaces the oldest one.

        Args:
            x: tokens `[B, 1, D]`, in the dtype of the parameters.
            pool: pool of N slots, the result of `state_pool`; updated in place. Copy states of prompts into it with
                `kalmix.steps.store`.
            slots: slots that each row reads and writes.

        Returns:
            y `[B, 1, D]`; 0 in rows of padding.

        Raises:
            ArgumentError: a row reads a full slot.

        Example:
            >>> from kalmix import steps
            >>> from kalmix.layers import GatedDeltaNet
            >>> layer, x = GatedDeltaNet(64, heads=2), torch.randn(2, 10, 64)
            >>> pool, rows = layer.state_pool(8), torch.tensor([5, 2])
            >>> steps.store(pool, rows, layer(x[:, :9])[1])  # prefill
            >>> y = layer.step(x[:, 9:], pool, steps.Slots(rows, rows))
            >>> torch.allclose(y, layer(x)[0][:, 9:], atol=1e-5)
            True
        """
        layer: Any = self
        self._check_room(pool, slots)
        with torch.no_grad():
            active = (slots.read >= 0)[:, None, None]
            readout, context = self.read_step(torch.where(active, x, 0), pool, slots)
            return torch.where(active, layer.project_out(readout, context), 0)

    def read_step(self, x: Tensor, pool: Any, slots: Slots) -> tuple[Tensor, Any]:
        """Return the read-out `[B, 1, E]` of one token per row and a context for `project_out`; update the pool.

        This form filters copies of the states. In rows of padding, it repeats the first other row.
        """
        layer: Any = self
        active = slots.read >= 0
        row = torch.where(active, torch.arange(len(active), device=active.device), active.int().argmax())
        state = in_order(_take(pool, slots.read[row].clamp(min=0)))
        (mean, _, after), context = layer.read(x[row], state)
        store_rows(tuple(_leaves(pool)), slots, tuple(_leaves(as_rings_like(after, pool))))
        return mean, context

    def _check_room(self, pool: Any, slots: Slots) -> None:
        """Raise `ArgumentError` if a row reads a full slot, where values may be read."""
        layer: Any = self
        history = find_history(pool)
        if history is None or not can_check_values(history.positions):
            return
        size = history.positions.shape[1]
        read = slots.read[slots.read >= 0]
        full = read[(history.positions[read] >= size - 1).any(1)]
        if full.numel() and (layer.window is None or layer.window > size):
            problem = f"has no room for another token in slot {int(full[0])}, which stores {size}"
            raise ArgumentError("pool", problem=problem, expected="a pool of slots with room for more tokens")


def _take(pool: Any, index: Tensor) -> Any:
    """Return copies of the states in slots."""
    return type(pool)(*(x.index_select(0, index) if isinstance(x, Tensor) else _take(x, index) for x in pool))


def _leaves(state: Any) -> list[Tensor]:
    """Return all tensors of a state."""
    return [state] if isinstance(state, Tensor) else [leaf for x in state for leaf in _leaves(x)]
