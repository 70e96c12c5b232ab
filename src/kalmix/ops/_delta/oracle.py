"""Defining recursion of `delta`; equation numbers are those of Memory by Design."""

from __future__ import annotations

import torch

from kalmix.ops._shared.recursion import Recursion, State, Token, condition, predict_memory, prior_memory, read_memory


def update(belief: State, token: Token) -> State:
    """Condition on the value, with the predicted covariance set to `reset` (Proposition 2)."""
    reset = token["reset"] if token["reset"].ndim == 2 else token["reset"][:, None]
    covariance = torch.diag_embed(reset.expand_as(token["k"]))
    return (condition(belief[0], covariance, token)[0],)


RECURSION = Recursion(prior_memory, predict_memory, update, read_memory)
