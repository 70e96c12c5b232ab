"""Test problems of `diagonal` for the laws."""

from __future__ import annotations

from kalmix.designs import KLA
from kalmix.ops._diagonal.spec import SPEC
from kalmix.testing.problems import MOST, Normal, Problem, Tensors, draw_tokens


def draw(normal: Normal, sequences: int, size: dict[str, int]) -> Tensors:
    b, t, g, k, v = (size[x] for x in "BTGKV")
    return draw_tokens(normal, size) | {
        "precision": normal(b, t, g, v).exp(),
        "log_decay": -0.2 * normal(g, k, v).exp(),
        "process_noise": 0.1 * normal(g, k, v).exp(),
        "prior.mean": normal(sequences, g, k, v),
        "prior.variance": normal(sequences, g, k, v).exp(),
    }


PROBLEMS = {
    "diagonal": Problem(
        design=KLA,
        draw=draw,
        idle={"precision": 0.0, "log_decay": 0.0, "process_noise": 0.0},
        evidence_signal="precision",
        invariant=("log_decay", "process_noise"),
        certain_signals=tuple(
            {"precision": 1 / SPEC.least_noise, "log_decay": decay, "process_noise": noise}
            for decay, noise in ((0.0, 0.0), (0.0, 1.0), (-30.0, 0.0), (-1e-3, 1e3))
        ),
        ranges={"precision": (1 / MOST, 1 / SPEC.least_noise), "process_noise": (1e-6, MOST)},
    ),
}
