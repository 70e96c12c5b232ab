"""Test problems of `attend` for the laws."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kalmix.designs import AFA
from kalmix.ops._attend.spec import SPEC
from kalmix.testing.problems import MOST, Normal, Problem, Tensors, draw_tokens

NOISES = ("process_noise", "key_noise", "query_noise")
VALUES = "value_dynamics."


def draw_dynamics(normal: Normal, heads: int, channels: int, prefix: str = "") -> Tensors:
    """Draw decays, frequencies and noises, with `prefix` put before their names."""
    drawn = {"log_decay": -0.2 * normal(heads).exp(), "frequency": normal(heads, channels)}
    drawn |= {name: normal(heads).exp() for name in NOISES}
    return {prefix + name: x for name, x in drawn.items()}


def draw_observations(normal: Normal, sequences: int, size: dict[str, int]) -> Tensors:
    """Draw tokens with non-decreasing times and no history; values have the width of keys."""
    b, t, h, width = (size[x] for x in "BTHK")
    width += width % 2
    drawn = draw_tokens(normal, size | {"K": width, "V": width})
    drawn |= {"q": drawn["q"] / width**0.5} | draw_dynamics(normal, h, width // 2)
    return drawn | {"times": (normal(b, t) + 0.5).clamp(min=0).cumsum(1)}


def draw_history(normal: Normal, sequences: int, size: dict[str, int]) -> Tensors:
    """Draw tokens and a history with some empty slots."""
    drawn, h, g = draw_observations(normal, sequences, size), size["H"], size["G"]
    width, slots = drawn["k"].shape[3], torch.tensor([[0, 1, 2, 3, 4], [-1, 0, -1, 1, 2], [-1, -1, -1, -1, -1]])
    return drawn | {
        "prior.keys": normal(sequences, 5, h, width),
        "prior.values": normal(sequences, 5, g, width),
        "prior.times": -normal(sequences, 5).abs().cumsum(1).flip(1),
        "prior.positions": slots[torch.arange(sequences) % 3],
    }


def draw_values(normal: Normal, sequences: int, size: dict[str, int]) -> Tensors:
    """Draw tokens and a history; values have their own width and dynamics."""
    drawn, width = draw_history(normal, sequences, size), size["V"] + size["V"] % 2
    v, past_values = drawn["v"], drawn["prior.values"]
    drawn |= {"v": normal(*v.shape[:3], width), "prior.values": normal(*past_values.shape[:3], width)}
    return drawn | draw_dynamics(normal, size["H"], width // 2, VALUES)


_SURE = tuple(
    {"key_noise": SPEC.least_noise, "query_noise": 0.0, "log_decay": decay, "process_noise": noise}
    for decay, noise in ((0.0, 0.0), (0.0, 1.0), (-30.0, 0.0), (-1e-3, 1e-6))
)
_HISTORY = partial(
    Problem, design=AFA, draw=draw_history, idle={}, evidence_signal=None,
    invariant=("log_decay", "frequency", *NOISES), certain_signals=_SURE,
    ranges=dict.fromkeys(NOISES, (SPEC.least_noise, MOST)), interpreted=None,
)  # fmt: skip


def _and_of_values(x: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of x, and the same entries for the dynamics of values."""
    return x | {VALUES + name: entry for name, entry in x.items()}


PROBLEMS = {
    "attend": _HISTORY(
        draw=draw_values,
        invariant=tuple(_and_of_values(dict.fromkeys(("log_decay", "frequency", *NOISES)))),
        certain_signals=tuple(map(_and_of_values, _SURE)),
        ranges=_and_of_values(dict.fromkeys(NOISES, (SPEC.least_noise, MOST))),
        interpreted={"value_heads": 1, "length": 11},
    ),
    "attend-shared": _HISTORY(),
    "attend-window": _HISTORY(
        draw=draw_observations,
        options={"weight": "exponential", "window": 6, "nu": 2.0, "temperature": 0.7, "floor": 0.1},
        certain_signals=(
            {"key_noise": SPEC.least_noise, "query_noise": 1.0, "log_decay": -1e-3, "process_noise": 0.0},
        ),
    ),
}
