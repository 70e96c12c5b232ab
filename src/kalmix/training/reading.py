"""What a model believes while it reads a text."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kalmix import ops
from kalmix.errors import ArgumentError
from kalmix.layers import KLA, MIXERS
from kalmix.layers.memory import MemoryLayer
from kalmix.models import KalmixForCausalLM
from kalmix.training.data import mark


class Reading(NamedTuple):
    """A text as a model read it; T tokens, L layers that hold a Kalman belief.

    Attributes:
        tokens: the text of each token, T of them.
        surprisal: `[T]` bits each token cost, given all before it.
        names: the layers, by place in the model and mixer, L of them.
        variance: `[L, T]` predictive variance: of the layer's output at the token, averaged over its columns.
        gain: `[L, T]` write gain: the part of the variance that the token took away of what it observed, 1 - s' / s~
            with s~ the variance before its evidence and s' after, averaged over cells, or of what stands at its key
            over heads. 0: ignored; 1: taken at its word.
        weights: of KLA's layers, as many as there are, `[L, T, T]` the Kalman attention map (appendix E.4): the size
            of a token's (column's) part in what is read out at another (row), averaged over channels; `None` unless
            asked for.
    """

    tokens: list[str]
    surprisal: Tensor
    names: list[str]
    variance: Tensor
    gain: Tensor
    weights: Tensor | None


@torch.no_grad()
def read(model: KalmixForCausalLM, tokenizer: PreTrainedTokenizerFast, text: str, *, weights: bool = False) -> Reading:
    """Read `text` from its beginning, as one sequence; with `weights`, memory grows as L T^2 channels.

    Raises:
        ArgumentError: the text is empty, or no layer of the model knows how sure it is.
    """
    ids, tokens = _tokens(tokenizer, text)
    inner = model.model
    traced = inner(inner.embed_tokens(ids[None].to(model.device)), remember=True, beliefs=True)
    logits = inner.logits(traced.hidden)[0, :-1].float().cpu()
    nats = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
    names, variance, gain, maps = [], [], [], []
    for place, (block, signal, belief) in enumerate(zip(inner.blocks, traced.signals, traced.beliefs, strict=True), 1):
        layer = block.mixer
        of_cells = isinstance(layer, KLA)
        if of_cells:
            found = _gain(layer, signal)
        elif isinstance(layer, MemoryLayer) and layer.has_posterior and getattr(layer, "precision_proj", None) is None:
            found = _leverage(layer, signal)
        else:
            continue
        names.append(f"layer {place}")
        variance.append(belief.variance[0, 1:].mean(-1).cpu())
        gain.append(found[1:].cpu())
        if weights and of_cells:
            maps.append(_weights(layer, signal)[1:, 1:].cpu())
    if not names:
        shown = (KLA, MemoryLayer)
        known = ", ".join(repr(n) for n, mixer in MIXERS.items() if mixer.has_posterior and issubclass(mixer, shown))
        raise ArgumentError("model", got="without a layer that knows how sure it is", needs=f"a layer of {known}")
    return Reading(
        tokens, nats / math.log(2), names, torch.stack(variance), torch.stack(gain), torch.stack(maps) if maps else None
    )


def _tokens(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[Tensor, list[str]]:
    """Ids of `END` and the text, `[1 + T]`, and each token's own piece of the text.

    A letter of several bytes may be several tokens; it is shown at the first of them.
    """
    if not text:
        raise ArgumentError("text", got="empty", needs="at least one character")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    pieces, seen = [], 0
    for _, stop in encoded["offset_mapping"]:
        pieces.append(text[seen:stop])
        seen = max(seen, stop)
    return torch.tensor([mark(tokenizer), *encoded["input_ids"]]), pieces


def _gain(layer: KLA, x: Tensor) -> Tensor:
    """The write gain of each token, `[T]`, from the beliefs before and after it; O(T) calls of the layer."""
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
    """The write gain of each token at its own key, `[T]`: with s' the variance there and r^2 the noise, s' / r^2.

    For 1 / s' = 1 / s~ + 1 / r^2. Of a regression it is the token's leverage.
    """
    _, k, v, _ = layer.project(x, None, None, None)
    signals: dict[str, Any] = layer.signals(x)
    after = layer.op(k, k, v, **signals, variance=True).variance
    assert after is not None
    weight = 1 / signals["obs_noise"] if "obs_noise" in signals else signals.get("gain", torch.ones(()))
    return (weight * after[..., 0])[0].mean(-1)


def _weights(layer: KLA, x: Tensor) -> Tensor:
    """How much of each token's value is in each token's read-out, `[T, T]`, averaged over channels."""
    matrix = ops.diagonal_matrix(**layer.signals(x)[0])
    return matrix.weights[0].abs().mean((0, 1))
