"""Problems that the laws try `attend` on."""

from __future__ import annotations

from functools import partial

import torch

from kalmix.designs import AFA
from kalmix.ops._attend.spec import SPEC
from kalmix.testing.problems import MOST, Normal, Problem, Tensors, draw_tokens

NOISES = ("process_noise", "key_noise", "query_noise")


def draw_observations(normal: Normal, sequences: int, size: dict[str, int]) -> Tensors:
    """Draw observations of a state at times that stand still and go on; nothing was seen before."""
    b, t, h, width = (size[x] for x in "BTHK")
    width += width % 2
    drawn = draw_tokens(normal, size | {"K": width, "V": width})
    return drawn | {
        "q": drawn["q"] / width**0.5,
        "log_decay": -0.2 * normal(h).exp(),
        "frequency": normal(h, width // 2),
        **{name: normal(h).exp() for name in NOISES},
        "times": (normal(b, t) + 0.5).clamp(min=0).cumsum(1),
    }


def draw_history(normal: Normal, sequences: int, size: dict[str, int]) -> Tensors:
    """Draw observations after earlier ones, which are in slots, some of them empty."""
    drawn, h, g = draw_observations(normal, sequences, size), size["H"], size["G"]
    width, slots = drawn["k"].shape[3], torch.tensor([[0, 1, 2, 3, 4], [-1, 0, -1, 1, 2], [-1, -1, -1, -1, -1]])
    return drawn | {
        "prior.keys": normal(sequences, 5, h, width),
        "prior.values": normal(sequences, 5, g, width),
        "prior.times": -normal(sequences, 5).abs().cumsum(1).flip(1),
        "prior.positions": slots[torch.arange(sequences) % 3],
    }


_SURE = tuple(
    {"key_noise": SPEC.least_noise, "query_noise": 0.0, "log_decay": decay, "process_noise": noise}
    for decay, noise in ((0.0, 0.0), (0.0, 1.0), (-30.0, 0.0), (-1e-3, 1e-6))
)
_HISTORY = partial(
    Problem,
    design=AFA,
    draw=draw_history,
    idle={},
    silent=None,
    invariant=("log_decay", "frequency", *NOISES),
    sure=_SURE,
    ranges=dict.fromkeys(NOISES, (SPEC.least_noise, MOST)),
)

PROBLEMS = {
    "attend": _HISTORY(interpreted={"value_heads": 1, "length": 11}),
    "attend-window": _HISTORY(
        draw=draw_observations,
        options={"weight": "exponential", "window": 6, "nu": 2.0, "temperature": 0.7, "floor": 0.1},
        sure=({"key_noise": SPEC.least_noise, "query_noise": 1.0, "log_decay": -1e-3, "process_noise": 0.0},),
        interpreted=None,
    ),
}
