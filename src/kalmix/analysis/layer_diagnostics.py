"""Diagnose the layers of a model: their variances, write gains and attention maps while it reads tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.models import LanguageModel


class Insight(NamedTuple):
    """A layer with a posterior, over T tokens; float32, on the CPU.

    Attributes:
        name: the layer's, by its place in the model.
        variance: `[T, E]` posterior variance of what is read at each token, a column of the read-out each.
        output: `[T]` predictive variance of the layer's output, averaged over its columns.
        gain: `[T]` write gain, as `Mixer.write_gain` defines it; `None` for layers that have none.
        weights: `[M, T, T]` attention maps, as `Mixer.attention_map` defines them; `None` unless asked for, and for
            layers that have none.
    """

    name: str
    variance: Tensor
    output: Tensor
    gain: Tensor | None
    weights: Tensor | None


@torch.no_grad()
def look(model: LanguageModel, x: Tensor, *, weights: bool = False) -> tuple[Tensor, list[Insight]]:
    """Read embedded tokens `x` `[T, D]` as one sequence, from the prior.

    Args:
        model: on any device.
        x: on that device.
        weights: whether to give attention maps, which take M T^2 numbers a layer.

    Returns:
        The residual stream behind the last block, `[T, D]`, and an `Insight` for each layer with a posterior.
    """
    output = model(x[None], output_states=True, output_beliefs=True)
    found = []
    layers = zip(model.mixers, output.mixer_inputs, output.beliefs, strict=True)
    for place, (mixer, signal, known) in enumerate(layers, 1):
        read = mixer.read(signal, None, None, True)[0] if mixer.has_posterior else None
        if read is not None and read.variance is not None and known.variance is not None:
            gain, maps = mixer.write_gain(signal), mixer.attention_map(signal) if weights else None
            found.append(
                Insight(
                    f"layer {place}",
                    read.variance[0].float().cpu(),
                    known.variance[0].mean(-1).float().cpu(),
                    None if gain is None else gain[0].float().cpu(),
                    None if maps is None else maps[0].float().cpu(),
                )
            )
    return output.last_hidden_state[0], found
