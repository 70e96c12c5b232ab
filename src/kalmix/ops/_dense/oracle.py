"""The defining recursion of `dense`: equations of Memory by Design."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.ops._shared.recursion import Recursion, State, Token, condition, prior_memory, read_memory, transition


def prior(k: Tensor, v: Tensor) -> State:
    return (*prior_memory(k, v), torch.diag_embed(torch.ones_like(k)))


def predict(belief: State, token: Token) -> State:
    """Equation 9."""
    mean, covariance = belief
    move = transition(token)
    return move @ mean, move @ covariance @ move.mT + _diffusion(token)


def _diffusion(token: Token) -> Tensor | float:
    """l^2 D, `[G, K, K]`: every row diffuses or, of pairs, the observed ones."""
    if "process_noise" not in token:
        return 0.0
    rows = torch.ones_like(token["k"])
    if "angle" in token:
        rows[:, rows.shape[1] // 2 :] = 0
    return token["process_noise"][:, None, None] * torch.diag_embed(rows)


def update(belief: State, token: Token) -> State:
    return condition(belief[0], belief[1], token)


def read(belief: State, token: Token) -> tuple[Tensor, Tensor]:
    """Equation 8, and the variance that all columns share: q'P q."""
    query = token["q"][..., None]
    return read_memory(belief, token)[0], (query.mT @ belief[1] @ query)[:, 0]


RECURSION = Recursion(prior, predict, update, read)
