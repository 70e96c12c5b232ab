"""Part of all layers that decodes one token for each row of a batch, in place on a pool of states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix.distributed.tensor_parallel import HeadSharding
from kalmix.errors import ArgumentError
from kalmix.steps import Slots, store_rows


class SteppedLayer(HeadSharding):
    """Base class of `Mixer` that adds steps: decoding over a pool of states, as `kalmix.steps` describes it.

    A layer whose op has a step overrides `read_step`, which works in place. Other layers filter copies of the states.
    """

    @property
    def steps_in_place(self) -> bool:
        """Whether `step` updates slots in place instead of filtering copies of the states."""
        return type(self).read_step is not SteppedLayer.read_step

    def state_pool(self, count: int) -> Any:
        """Return a pool of states for `step`: the layer's state, whose first axis is slots, with the prior in each.

        Args:
            count: number of slots. With 1, it is the state to store for a sequence that starts.

        Raises:
            ArgumentError: the state stores past tokens, so that its size is not constant.

        Example:
            >>> from kalmix.layers import GatedDeltaNet
            >>> pool = GatedDeltaNet(64, heads=2, head_dim=8).state_pool(8)
            >>> pool.belief.mean.shape, pool.conv_state.shape
            (torch.Size([8, 2, 8, 16]), torch.Size([8, 3, 64]))
        """
        layer: Any = self
        self._check_constant_size()
        weight = next(self.parameters())
        with torch.no_grad():
            _, prior = layer(weight.new_zeros(1, 0, layer.hidden_size))
        return prior.take(torch.zeros(count, dtype=torch.int64, device=weight.device))

    def step(self, x: Tensor, pool: Any, slots: Slots) -> Tensor:
        """Filter one token for each row of a batch, in place on a pool of states. It has no gradients.

        The output of a row is that of `layer(x, state)` with the state in the slot that the row reads; the new state is
        stored in the slot that it writes. `kalmix.steps` describes slots and what a step does not check. The memory
        layers and `KLA`, whose ops have steps, update their slots in place; other layers filter copies of the states.

        Args:
            x: tokens `[B, 1, D]`, in the dtype of the parameters.
            pool: pool of N slots: the result of `state_pool`, or a state of N sequences; updated in place. Copy states
                of prompts into it with `kalmix.steps.store`.
            slots: slots that each row reads and writes.

        Returns:
            y `[B, 1, D]`; 0 in rows of padding.

        Raises:
            ArgumentError: the state stores past tokens, so that its size is not constant.

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
        self._check_constant_size()
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
        (mean, _, after), context = layer.read(x[row], _take(pool, slots.read[row].clamp(min=0)))
        store_rows(tuple(_leaves(pool)), slots, tuple(_leaves(after)))
        return mean, context

    def _check_constant_size(self) -> None:
        layer: Any = self
        if layer.state_size(1) != layer.state_size(2):
            problem = "stores past tokens in its state, for which a pool has no slots of constant size"
            raise ArgumentError(type(self).__name__, problem=problem, expected="a layer whose state has constant size")


def _take(pool: Any, index: Tensor) -> Any:
    """Return copies of the states in slots."""
    return type(pool)(*(x.index_select(0, index) if isinstance(x, Tensor) else _take(x, index) for x in pool))


def _leaves(state: Any) -> list[Tensor]:
    """Return all tensors of a state."""
    return [state] if isinstance(state, Tensor) else [leaf for x in state for leaf in _leaves(x)]
