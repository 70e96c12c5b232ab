"""Models of the benchmarks: one backbone with the variations of the original codes."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from kalmix.layers.modules import RMSNorm, sample_gaussian
from kalmix.models.blocks import Block
from kalmix.models.causal_lm import EMBEDDING_STD, LanguageModel
from kalmix_bench.experiments.recall.deterministic_embedding import lookup
from kalmix_bench.experiments.recall.model_shape import ModelShape


class TokenModel(nn.Module):
    """Model that predicts a target at each token: embedding, blocks, norm, head. `logits = model(ids)`.

    With a layer's option `samples`, logits are those of the mean probability over samples of the last layer's
    posterior,
    and their cross entropy is the marginal likelihood of equations 24 and 25 of Kalman Linear Attention.
    """

    def __init__(self, vocabulary: int, shape: ModelShape, name: str) -> None:
        super().__init__()
        width, entry = shape.hidden_size, {**shape.layer_options(name), "mlp": shape.mlp}
        self.samples = entry.pop("samples", 0)
        tied = shape.head == "tied"
        self.model = LanguageModel(vocabulary, width, [entry] * shape.depth, tie_word_embeddings=tied)
        if not tied:
            self.model.lm_head = nn.Linear(width, vocabulary)
            nn.init.zeros_(self.model.lm_head.bias)
        self.dropout, self.encoder = nn.Dropout(shape.dropout), _encoder(shape)
        for block in self.model.layers:
            assert isinstance(block, Block)
            block.norm = _norm(shape)
            block.mlp_norm = _norm(shape) if shape.add_norm or shape.mlp else None
            if shape.add_norm:
                setattr(block, "mlp", nn.Identity())  # noqa: B010 - it is declared as an MLP
        self.model.norm = _norm(shape)
        if shape.zoology_init:
            _scale(self.model, shape.depth)
        if shape.decoder:
            self.model.lm_head = _decoder(vocabulary, shape)[1:]  # the model already has its first norm

    def embed(self, ids: Tensor) -> Tensor:
        """Return the input of the first block, `[..., D]`, for ids `[...]`."""
        return self.encoder(self.dropout(lookup(self.model.embed_tokens.get_parameter("weight"), ids)))

    def hidden_states(self, ids: Tensor) -> Tensor:
        """Return the hidden states after the last block, `[S, B, T, D]` for S samples (or 1), for ids `[B, T]`."""
        output = self.model(self.embed(ids), output_states=False, output_posterior=self.samples > 0)
        if output.posterior is None:
            return output.hidden_state[None]
        moments = (output.posterior.mean, output.posterior.variance)
        readouts = sample_gaussian(*(x.expand(self.samples, *x.shape) for x in moments))
        return self.model.layers.finish(output.posterior, readouts)

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return logits `[B, T, vocabulary]`; or `[B, K, vocabulary]` of the tokens at `positions` `[B, K]`."""
        hidden = self.hidden_states(ids)
        if positions is not None:  # a product: the gradient of an index would be a sum in any order on a GPU
            hidden = (positions[..., None] == torch.arange(ids.shape[1], device=ids.device)).to(hidden.dtype) @ hidden
        return expected_logits(self.model.logits(hidden))


class AutoEncoder(nn.Module):
    """Model that predicts all tokens from the last token's hidden state: MAD's model of compression.

    The decoder's input at each position is the last hidden state plus a sinusoidal position embedding.
    """

    def __init__(self, vocabulary: int, shape: ModelShape, name: str, length: int) -> None:
        super().__init__()
        self.encoder = TokenModel(vocabulary, replace(shape, decoder=()), name)
        del self.encoder.model.norm, self.encoder.model.lm_head  # the decoder has its own
        self.positions = nn.Buffer(sinusoidal_positions(length, shape.hidden_size), persistent=False)
        self.decoder = _decoder(vocabulary, shape)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits `[B, T, vocabulary]` for ids `[B, T]`; T is fixed at construction."""
        last = self.encoder.hidden_states(ids)[:, :, -1:]
        return expected_logits(self.decoder(last + self.positions))


def build(vocabulary: int, shape: ModelShape, name: str, length: int, *, from_last: bool) -> TokenModel | AutoEncoder:
    """Build a model for rows of `length` ids below `vocabulary`, initialized by PyTorch's global generator.

    Args:
        vocabulary: number of ids.
        shape: sizes of the model.
        name: layer as `layers.parse_layer` takes it.
        length: tokens per row.
        from_last: whether all targets are predicted from the last token.

    Raises:
        ArgumentError: there is no such layer, or it does not support the state size of `shape`.
    """
    return AutoEncoder(vocabulary, shape, name, length) if from_last else TokenModel(vocabulary, shape, name)


def expected_logits(logits: Tensor) -> Tensor:
    """Return logits `[...]` of the mean over S of the probabilities of logits `[S, ...]`."""
    return logits[0] if len(logits) == 1 else logits.log_softmax(-1).logsumexp(0)


def sinusoidal_positions(length: int, width: int) -> Tensor:
    """Return sines and cosines of positions `[length, width]` at `width / 2` frequencies from 1 down to 1 / 10,000."""
    half = width // 2
    rates = torch.exp(-math.log(10_000) / max(half - 1, 1) * torch.arange(half))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos(), torch.zeros(length, width - 2 * half)], dim=1)


def _norm(shape: ModelShape, width: int | None = None) -> Any:
    return (nn.LayerNorm if shape.norm == "layer" else RMSNorm)(shape.hidden_size if width is None else width)


def _encoder(shape: ModelShape) -> nn.Module:
    if not shape.encoder:
        return nn.Identity()
    up, down = nn.Linear(shape.hidden_size, shape.encoder), nn.Linear(shape.encoder, shape.hidden_size)
    return nn.Sequential(_norm(shape), up, nn.GELU(), down)


def _decoder(vocabulary: int, shape: ModelShape) -> nn.Sequential:
    """Return an MLP to logits with a norm before each linear map, initialized as MAD's."""
    widths = (shape.hidden_size, *shape.decoder)
    steps = [part for a, b in pairwise(widths) for part in (_norm(shape, a), nn.Linear(a, b), nn.GELU())]
    decoder = nn.Sequential(*steps, _norm(shape, widths[-1]), nn.Linear(widths[-1], vocabulary))
    for part in decoder:
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=EMBEDDING_STD)
            nn.init.zeros_(part.bias)
    return decoder


def _scale(model: LanguageModel, depth: int) -> None:
    """Initialize linear maps as Zoology does."""
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear):
            writes = name.endswith("out_proj")
            nn.init.normal_(part.weight, std=EMBEDDING_STD / (math.sqrt(2 * depth) if writes else 1.0))
            if part.bias is not None and not getattr(part.bias, "_no_reinit", False):  # keep Mamba's step bias
                nn.init.zeros_(part.bias)
