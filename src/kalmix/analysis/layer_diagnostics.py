"""What the layers of a model believe while it reads tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix import ops
from kalmix.layers import KLA, Mixer
from kalmix.layers.memory_base import MemoryLayer
from kalmix.models import LanguageModel


class Insight(NamedTuple):
    """A layer with a posterior, over T tokens; float32, on the CPU.

    Attributes:
        name: the layer's, by its place in the model.
        variance: `[T, E]` posterior variance of what is read at each token, a column of the read-out each.
        output: `[T]` predictive variance of the layer's output, averaged over its columns.
        gain: `[T]` write gain: the part of the variance that the token took away of what it observed, 1 - s' / s~
            with s~ the variance before its evidence and s' after, averaged over cells, or of what stands at its key
            over heads. 0: ignored; 1: taken at its word. `None` for layers that do not say.
        weights: `[M, T, T]`, a Kalman attention map (appendix E.4) of each of KLA's channels, or of each head of a
            memory: what an earlier token's value (column) counts for in what is read at another (row). `None` unless
            asked for, and for layers that do not say.
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
    traced = model(x[None], remember=True, beliefs=True)
    found = []
    for place, (mixer, signal, known) in enumerate(zip(model.mixers, traced.signals, traced.beliefs, strict=True), 1):
        read = mixer.read(signal, None, None, True)[0] if mixer.has_posterior else None
        if read is not None and read.variance is not None and known.variance is not None:
            taken, maps = gain(mixer, signal), attention(mixer, signal) if weights else None
            found.append(
                Insight(
                    f"layer {place}",
                    read.variance[0].float().cpu(),
                    known.variance[0].mean(-1).float().cpu(),
                    None if taken is None else taken.float().cpu(),
                    None if maps is None else maps.float().cpu(),
                )
            )
    return traced.hidden[0], found


def gain(mixer: Mixer, x: Tensor) -> Tensor | None:
    """The write gain of each token of `x` `[1, T, D]`, `[T]`; `None` where a layer does not say."""
    if isinstance(mixer, KLA):
        return _taken(mixer, x)
    memory = _regression(mixer)
    return None if memory is None else _leverage(memory, x)


def attention(mixer: Mixer, x: Tensor) -> Tensor | None:
    """What each token's value counts for in each read-out, `[channels or heads, T, T]`, lower triangular.

    Of KLA in closed form. A memory's read-out is linear in values too, and the same for every column: its map is what
    it makes of values that are the columns of the identity. `None` where a layer does not say.
    """
    if isinstance(mixer, KLA):
        return ops.diagonal_matrix(**mixer.signals(x)[0]).weights[0].flatten(0, 1)
    memory = _regression(mixer)
    if memory is None:
        return None
    q, k, v, _ = memory.project(x, None, None, None)
    places = torch.eye(x.shape[1], dtype=v.dtype, device=v.device)[None, :, None].expand(1, -1, v.shape[2], -1)
    return memory.op(q, k, places, **memory.signals(x)).mean[0].transpose(0, 1)


def _regression(mixer: Mixer) -> MemoryLayer | None:
    """The mixer, if it is a memory that sees values along keys, with one noise for all columns of a head."""
    if isinstance(mixer, MemoryLayer) and mixer.has_posterior and getattr(mixer, "precision_proj", None) is None:
        return mixer
    return None


def _taken(layer: KLA, x: Tensor) -> Tensor:
    """From the beliefs before and after each token; O(T) calls of the layer."""
    log_decay, process_noise = layer.dynamics(torch.float32)
    kept, state, gains = (2 * log_decay).exp(), None, []
    before = torch.ones_like(log_decay)[None]  # the prior
    for token in x.split(1, dim=1):
        _, state = layer(token, state)
        expected = kept * before + process_noise
        before = state.belief.variance
        gains.append(1 - (before / expected).mean())
    return torch.stack(gains)


def _leverage(layer: MemoryLayer, x: Tensor) -> Tensor:
    """At each token's own key: with s' the variance there and r^2 the noise, s' / r^2.

    For 1 / s' = 1 / s~ + 1 / r^2. Of a regression it is the token's leverage.
    """
    _, k, v, _ = layer.project(x, None, None, None)
    signals: dict[str, Any] = layer.signals(x)
    after = layer.op(k, k, v, **signals, variance=True).variance
    assert after is not None
    weight = 1 / signals["obs_noise"] if "obs_noise" in signals else signals.get("gain", torch.ones(()))
    return (weight * after[..., 0])[0].mean(-1)
