"""Building blocks of oracles: an op's defining recursion for one token of one sequence, in float64.

Beliefs are tuples of tensors and tokens are dicts of signals; neither has a batch or time axis. The code is written for
readability: textbook formulas, no dependency but torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Token = dict[str, Any]
State = tuple[Tensor, ...]


class Recursion(NamedTuple):
    """Filter for one sequence.

    Attributes:
        prior: computes the default belief from zeros in the shapes of a token's key and value.
        predict: computes the belief before an observation from the previous belief and the token.
        update: computes the belief after the observation.
        read: computes the mean of the read-out and its variance, or `None` if the op has no variance.
        columns: whether the variance is `[G, V]`, one per column of the read-out, rather than `[G, 1]`.
        shares_keys: whether the functions take `q` and `k` with H heads; otherwise these are repeated to G heads.
        invariant: signals that may come without batch and time axes; they then have at most three axes.
    """

    prior: Callable[[Tensor, Tensor], State]
    predict: Callable[[State, Token], State]
    update: Callable[[State, Token], State]
    read: Callable[[State, Token], tuple[Tensor, Tensor | None]]
    columns: bool = False
    shares_keys: bool = False
    invariant: tuple[str, ...] = ()


# Linear memories: one matrix `[K, V]` per head; equation numbers are those of Memory by Design.


def prior_memory(k: Tensor, v: Tensor) -> State:
    """Return a memory of zeros, `[G, K, V]`."""
    return (k.new_zeros(*k.shape, v.shape[-1]),)


def predict_memory(belief: State, token: Token) -> State:
    """Compute A M."""
    return (transition(token) @ belief[0],)


def read_memory(belief: State, token: Token) -> tuple[Tensor, None]:
    """Compute M'q, equation 8."""
    return (token["q"][..., None].mT @ belief[0])[:, 0], None


def transition(token: Token) -> Tensor:
    """Return the transition matrix A, `[G, K, K]`: given as such, or the product of a decay and a rotation."""
    if "matrix" in token:
        return token["matrix"]
    width = token["k"].shape[-1]
    if "angle" in token:  # appendix D: rotates the pairs (j, j + K / 2)
        cos, sin = torch.diag_embed(token["angle"].cos()), torch.diag_embed(token["angle"].sin())
        matrix = torch.cat([torch.cat([cos, -sin], -1), torch.cat([sin, cos], -1)], -2)
    else:
        matrix = torch.eye(width, dtype=torch.float64, device=token["k"].device).expand(len(token["k"]), width, width)
    if "log_decay" not in token:
        return matrix
    decay = token["log_decay"].exp()  # per head `[G]`, per key `[G, K]` or per pair `[G, K / 2]`
    decay = decay[:, None] if decay.ndim == 1 else decay
    return decay.repeat(1, width // decay.shape[1])[..., None] * matrix


def condition(mean: Tensor, covariance: Tensor, token: Token) -> tuple[Tensor, Tensor]:
    """Compute the posterior mean and covariance given v = M'k + noise, equations 10 to 13."""
    key, value = token["k"][..., None], token["v"][..., None, :]
    cov_key = covariance @ key
    gain = cov_key / (token["obs_noise"][:, None, None] + key.mT @ cov_key)
    return mean + gain @ (value - key.mT @ mean), covariance - gain @ cov_key.mT
