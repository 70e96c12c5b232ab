"""Parts of oracles: an op's defining recursion, one token of one sequence at a time, in float64.

Beliefs are tuples of tensors and signals a dict; neither has a batch or a time axis. Written to be read: textbook
formulas, torch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Token = dict[str, Any]
State = tuple[Tensor, ...]


class Recursion(NamedTuple):
    """A filter for one sequence.

    Attributes:
        prior: the default belief, from zeros in the shape of a token's key and of its value.
        predict: the belief before a token is observed, from the belief so far and the token.
        update: the belief after the token.
        read: mean of the read-out and its variance, if it has one.
        columns: whether each column of the read-out has its own variance; if not, `[G, 1]` serves all.
        shares_keys: whether value heads share key heads; if not, `q` and `k` are repeated for each value head.
        invariant: signals that may come without batch and time axes; they then have at most three axes.
    """

    prior: Callable[[Tensor, Tensor], State]
    predict: Callable[[State, Token], State]
    update: Callable[[State, Token], State]
    read: Callable[[State, Token], tuple[Tensor, Tensor | None]]
    columns: bool = False
    shares_keys: bool = False
    invariant: tuple[str, ...] = ()


# Memories: a matrix `[K, V]` a head, columns alike; equations of Memory by Design.


def prior_memory(k: Tensor, v: Tensor) -> State:
    return (k.new_zeros(*k.shape, v.shape[-1]),)


def predict_memory(belief: State, token: Token) -> State:
    return (transition(token) @ belief[0],)


def read_memory(belief: State, token: Token) -> tuple[Tensor, None]:
    """Equation 8."""
    return (token["q"][..., None].mT @ belief[0])[:, 0], None


def transition(token: Token) -> Tensor:
    """A, `[G, K, K]`."""
    if "matrix" in token:
        return token["matrix"]
    width = token["k"].shape[-1]
    if "angle" in token:  # appendix D: pairs (j, j + K / 2), observed rows first
        turn = torch.diag_embed(token["angle"].cos()), torch.diag_embed(token["angle"].sin())
        matrix = torch.cat([torch.cat([turn[0], -turn[1]], -1), torch.cat([turn[1], turn[0]], -1)], -2)
    else:
        matrix = torch.eye(width, dtype=torch.float64, device=token["k"].device).expand(len(token["k"]), width, width)
    if "log_decay" not in token:
        return matrix
    decay = token["log_decay"].exp()  # a head `[G]`, a key `[G, K]` or a pair `[G, K / 2]`
    decay = decay[:, None] if decay.ndim == 1 else decay
    return decay.repeat(1, width // decay.shape[1])[..., None] * matrix


def condition(mean: Tensor, covariance: Tensor, token: Token) -> tuple[Tensor, Tensor]:
    """Equations 10 to 13: the memory seen along the key."""
    key, value = token["k"][..., None], token["v"][..., None, :]
    warped = covariance @ key
    gain = warped / (token["obs_noise"][:, None, None] + key.mT @ warped)
    return mean + gain @ (value - key.mT @ mean), covariance - gain @ warped.mT
