"""What a model believes while it reads a text."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kalmix._extras import optional_imports

with optional_imports():
    from transformers import PreTrainedTokenizerFast

from kalmix.analysis.layer_diagnostics import look
from kalmix.errors import ArgumentError
from kalmix.models import KalmixForCausalLM
from kalmix.training.data import end_of_text_id


class Reading(NamedTuple):
    """A text as a model read it; T tokens, L layers that say how much they take from a token.

    Attributes:
        tokens: the text of each token, T of them.
        surprisal: `[T]` bits each token cost, given all before it.
        names: the layers, by place in the model, L of them.
        variance: `[L, T]` predictive variance: of the layer's output at the token, averaged over its columns.
        gain: `[L, T]` write gain, as `Insight` has it.
        weights: `[L, T, T]` attention maps: the size of a token's (column's) part in what is read out at another
            (row), averaged over channels or heads; `None` unless asked for.
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
        ArgumentError: the text is empty, or no layer of the model has a write gain.
    """
    ids, tokens = _tokens(tokenizer, text)
    embedded = model.model.embed_tokens(ids.to(model.device))
    hidden, insights = look(model.model, embedded, weights=weights)
    logits = model.model.logits(hidden)[:-1].float().cpu()
    nats = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
    told = [(insight, insight.gain) for insight in insights if insight.gain is not None]
    if not told:
        expected = "a layer with a write gain, such as 'kla' or 'bayesian'"
        raise ArgumentError("model", got="without a layer that knows how sure it is", expected=expected)
    maps = [insight.weights.abs().mean(0)[1:, 1:] for insight, _ in told if insight.weights is not None]
    return Reading(
        tokens,
        nats / math.log(2),
        [insight.name for insight, _ in told],
        torch.stack([insight.output[1:] for insight, _ in told]),
        torch.stack([gain[1:] for _, gain in told]),
        torch.stack(maps) if maps else None,
    )


def _tokens(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[Tensor, list[str]]:
    """Ids of `END` and the text, `[1 + T]`, and each token's own piece of the text.

    A letter of several bytes may be several tokens; it is shown at the first of them.
    """
    if not text:
        raise ArgumentError("text", got="empty", expected="at least one character")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    pieces, seen = [], 0
    for _, stop in encoded["offset_mapping"]:
        pieces.append(text[seen:stop])
        seen = max(seen, stop)
    return torch.tensor([end_of_text_id(tokenizer), *encoded["input_ids"]]), pieces
