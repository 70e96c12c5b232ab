"""Diagnostics of a model over a text: surprisal, predictive variance and write gain of each token."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kalmix._extras import optional_imports

with optional_imports():
    from transformers import PreTrainedTokenizerFast

from kalmix.analysis.layer_diagnostics import diagnose_layers
from kalmix.errors import ArgumentError
from kalmix.models import KalmixForCausalLM
from kalmix.training.data import begin_id, check_unicode


class TextDiagnostics(NamedTuple):
    """Diagnostics over a text of T tokens, of the L layers that have a write gain.

    Attributes:
        tokens: text of each token, T strings.
        surprisal: `[T]` bits of each token given those before it.
        names: names of the layers, L strings.
        variance: `[L, T]` predictive variance of each layer's output, averaged over its columns.
        gain: `[L, T]` write gains.
        weights: `[L, T, T]` attention maps, or `None` if not requested: the size of the weight of a token (column) in
            the read-out at another (row), averaged over channels or heads.
    """

    tokens: list[str]
    surprisal: Tensor
    names: list[str]
    variance: Tensor
    gain: Tensor
    weights: Tensor | None


@torch.no_grad()
def diagnose_text(
    model: KalmixForCausalLM, tokenizer: PreTrainedTokenizerFast, text: str, *, weights: bool = False
) -> TextDiagnostics:
    """Run a model on a text, which begins with the same token as documents in training, and diagnose its layers.

    Args:
        model: model on any device.
        tokenizer: tokenizer of the model, with offsets.
        text: text of at least one character.
        weights: whether to compute attention maps; memory is O(L M T^2) for M channels or heads per layer.

    Raises:
        ArgumentError: the text is empty, UTF-8 cannot encode it, or no layer of the model has a write gain.
    """
    ids, tokens = _tokenize(tokenizer, text, begin_id(model, tokenizer))
    embedded = model.model.embed_tokens(ids.to(model.device))
    hidden, every = diagnose_layers(model.model.layers, embedded, weights=weights)
    logits = model.head_logits(model.model.norm(hidden))[:-1].float().cpu()
    nats = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
    layers = [(layer, layer.gain) for layer in every if layer.gain is not None]
    if not layers:
        expected = "a model with a layer that has one, such as 'kla' or 'bayesian'"
        raise ArgumentError("model", problem="has no layer with a write gain", expected=expected)
    maps = [layer.weights.abs().mean(0)[1:, 1:] for layer, _ in layers if layer.weights is not None]
    return TextDiagnostics(
        tokens,
        nats / math.log(2),
        [layer.name for layer, _ in layers],
        torch.stack([layer.output[1:] for layer, _ in layers]),
        torch.stack([gain[1:] for _, gain in layers]),
        torch.stack(maps) if maps else None,
    )


def _tokenize(tokenizer: PreTrainedTokenizerFast, text: str, begin: int) -> tuple[Tensor, list[str]]:
    """Return `begin` and the ids of the text, `[1 + T]`, and the text of each token.

    A character whose bytes are several tokens belongs to the first of them; the others have an empty text.
    """
    if not text:
        raise ArgumentError("text", got="empty", expected="at least one character")
    check_unicode("text", text)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens, start = [], 0
    for _, stop in encoded["offset_mapping"]:
        tokens.append(text[start:stop])
        start = max(start, stop)
    return torch.tensor([begin, *encoded["input_ids"]]), tokens
