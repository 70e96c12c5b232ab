"""Diagnostics of a model's layers: variances, write gains and attention maps over a sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.models.offload import loaded
from kalmix.models.stack import BlockStack


class LayerDiagnostics(NamedTuple):
    """Diagnostics of a layer with a posterior over T tokens, float32 on the CPU.

    Attributes:
        name: "layer N", counted from 1.
        variance: `[T, E]` posterior variance of each column of the read-out.
        output: `[T]` predictive variance of the layer's output, averaged over its columns.
        gain: `[T]` write gain (`Mixer.write_gain`), or `None` for layers without one.
        weights: `[M, T, T]` attention maps (`Mixer.attention_map`), or `None` if not requested or not defined.
    """

    name: str
    variance: Tensor
    output: Tensor
    gain: Tensor | None
    weights: Tensor | None


@torch.no_grad()
def diagnose_layers(stack: BlockStack, x: Tensor, *, weights: bool = False) -> tuple[Tensor, list[LayerDiagnostics]]:
    """Run the blocks of a model on one sequence and diagnose each layer that has a posterior.

    Args:
        stack: blocks of a model, on any device.
        x: `[T, D]` embedded tokens on that device, filtered from the prior.
        weights: whether to compute attention maps, which take M T^2 numbers per layer.

    Returns:
        The hidden state after the last block `[T, D]`, before the final norm, and diagnostics of the layers in order.
    """
    output = stack(x[None], output_states=True, output_beliefs=True)
    diagnostics = []
    layers = zip(stack.mixers, output.mixer_inputs, output.beliefs, strict=True)
    for number, (mixer, inputs, belief) in enumerate(layers, 1):
        with loaded(mixer):
            readout = mixer.read(inputs, None, None, True)[0] if mixer.has_posterior else None
        if readout is None or readout.variance is None or belief.variance is None:
            continue
        with loaded(mixer):
            gain = mixer.write_gain(inputs)  # calls the mixer, after which its weights are offloaded again
        with loaded(mixer):
            maps = mixer.attention_map(inputs) if weights else None
        diagnostics.append(
            LayerDiagnostics(
                f"layer {number}",
                readout.variance[0].float().cpu(),
                belief.variance[0].mean(-1).float().cpu(),
                None if gain is None else gain[0].float().cpu(),
                None if maps is None else maps[0].float().cpu(),
            )
        )
    return output.hidden_state[0], diagnostics
