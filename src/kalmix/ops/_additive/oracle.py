"""Defining recursion of `additive`; equation numbers are those of Memory by Design."""

from __future__ import annotations

from kalmix.ops._shared.recursion import Recursion, State, Token, predict_memory, prior_memory, read_memory


def update(belief: State, token: Token) -> State:
    """Add the token's write, estimated from its value alone (equations 23 to 25)."""
    weight = token["write_variance"] / (token["write_variance"] + token["obs_noise"])
    return (belief[0] + token["k"][..., None] * (weight[:, None] * token["v"])[..., None, :],)


RECURSION = Recursion(prior_memory, predict_memory, update, read_memory)
