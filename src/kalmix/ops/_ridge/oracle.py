"""Defining recursion of `ridge`, token by token, from the equations of Gated KalmaNet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmix.ops._shared.recursion import Recursion, State, Token, prior_memory

FACTOR = 0.02  # default ridge, relative to ||H||_F
MIN_NORM = 1e-10  # norm of H below which an adaptive ridge returns 0


def prior(k: Tensor, v: Tensor) -> State:
    """Return U = 0 and H = 0."""
    return (*prior_memory(k, v), torch.diag_embed(torch.zeros_like(k)))


def predict(belief: State, token: Token) -> State:
    """Multiply both sums by exp(log_decay)."""
    decay = token["log_decay"].exp()[:, None, None] if "log_decay" in token else 1.0
    return decay * belief[0], decay * belief[1]


def update(belief: State, token: Token) -> State:
    """Add k v' / r^2 to U and k k' / r^2 to H."""
    cross, gram = belief
    key, value, noise = token["k"][..., None], token["v"][..., None, :], token["obs_noise"][:, None, None]
    return cross + key @ value / noise, gram + key @ key.mT / noise


def read(belief: State, token: Token) -> tuple[Tensor, Tensor]:
    """Return the read-out of equation 3 by an exact solve, and its variance; 0 where an adaptive ridge is 0."""
    cross, gram = belief
    query, strength = token["q"], _ridge_strength(gram, token.get("ridge"))
    shift = torch.where(strength < torch.inf, strength, 1.0)[:, None, None]
    x = torch.linalg.solve(gram + shift * torch.eye(query.shape[1]).to(gram), query)
    x = torch.where((strength < torch.inf)[:, None], x, 0.0)
    reader = x if token.get("mix") is None else torch.lerp(query, x, token["mix"][:, None])
    return (reader[:, None] @ cross)[:, 0], (query * x).sum(-1, keepdim=True)


def _ridge_strength(gram: Tensor, ridge: Any) -> Tensor:
    """Return the ridge `[G]`: `ridge.value`, or `ridge.factor` or a number times ||H||_F; infinity where H is 0."""
    if hasattr(ridge, "value"):
        return torch.full_like(gram[:, 0, 0], ridge.value)
    square = gram.square().sum((-2, -1))
    nonzero = square > MIN_NORM**2
    norm = torch.where(nonzero, square, 1.0).sqrt()
    factor = ridge if isinstance(ridge, int | float) else getattr(ridge, "factor", FACTOR)
    return torch.where(nonzero, factor * norm, torch.inf)


RECURSION = Recursion(prior, predict, update, read)
