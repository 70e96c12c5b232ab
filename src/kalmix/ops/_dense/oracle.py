"""Defining recursion of `dense`, token by token, from the equations of Memory by Design."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.ops._shared.recursion import Recursion, State, Token, condition, prior_memory, read_memory, transition


def prior(k: Tensor, v: Tensor) -> State:
    """Return mean 0 and covariance I."""
    return (*prior_memory(k, v), torch.diag_embed(torch.ones_like(k)))


def predict(belief: State, token: Token) -> State:
    """Compute the prediction of equation 9."""
    mean, covariance = belief
    move = transition(token)
    return move @ mean, move @ covariance @ move.mT + _diffusion(token)


def _diffusion(token: Token) -> Tensor | float:
    """Return l^2 D, `[G, K, K]`: D is I, or with rotations the identity on the observed rows only."""
    if "process_noise" not in token:
        return 0.0
    rows = torch.ones_like(token["k"])
    if "angle" in token:
        rows[:, rows.shape[1] // 2 :] = 0
    return token["process_noise"][:, None, None] * torch.diag_embed(rows)


def update(belief: State, token: Token) -> State:
    """Condition the belief on the token's value."""
    return condition(belief[0], belief[1], token)


def read(belief: State, token: Token) -> tuple[Tensor, Tensor]:
    """Return the read-out of equation 8, and its variance q'P q, which all columns share."""
    query = token["q"][..., None]
    return read_memory(belief, token)[0], (query.mT @ belief[1] @ query)[:, 0]


RECURSION = Recursion(prior, predict, update, read)
