"""Defining recursion of `diagonal`; equation numbers are those of Kalman Linear Attention."""

from __future__ import annotations

from torch import Tensor

from kalmix.ops._shared.recursion import Recursion, State, Token


def prior(k: Tensor, v: Tensor) -> State:
    shape = (*k.shape, v.shape[-1])
    return k.new_zeros(shape), k.new_ones(shape)


def predict(belief: State, token: Token) -> State:
    """Predict by equation 7: z ~ N(a z, p)."""
    mean, variance = belief
    decay = token["log_decay"].exp() if "log_decay" in token else 1.0
    return decay * mean, decay**2 * variance + token.get("process_noise", 0.0)


def update(belief: State, token: Token) -> State:
    """Condition on the value by equation 9, with the gain P k / (k P k + 1/precision) of Table 5.

    The gain is computed in a form that allows a precision of 0.
    """
    mean, variance = belief
    key, value, precision = token["k"][..., None], token["v"][..., None, :], token["precision"][..., None, :]
    gain = variance * key * precision / (1 + key * variance * key * precision)
    return mean + gain * (value - key * mean), (1 - gain * key) * variance


def read(belief: State, token: Token) -> tuple[Tensor, Tensor]:
    """Compute mean and variance of the read-out (Algorithm 1, lines 12 and 14)."""
    mean, variance = belief
    query = token["q"][..., None]
    return (query * mean).sum(-2), (query**2 * variance).sum(-2)


RECURSION = Recursion(prior, predict, update, read, columns=True, invariant=("log_decay", "process_noise"))
