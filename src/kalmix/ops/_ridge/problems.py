"""Test problems of `ridge`: designs and random signals, used by the laws, `kalmix doctor` and the fuzz script."""

from __future__ import annotations

from kalmix.designs import GATED_KALMANET
from kalmix.ops._ridge.solvers import Adaptive, Chebyshev
from kalmix.ops._ridge.spec import SPEC
from kalmix.testing.problems import MOST, STILL, Normal, Problem, Tensors, draw_memory, symmetric


def draw(normal: Normal, sequences: int, size: dict[str, int]) -> Tensors:
    """Return random signals of a memory, a mix between 0 and 1, and a prior."""
    drawn = draw_memory(obs_noise="B T G", log_decay="B T G")(normal, sequences, size)
    g, width = size["G"], size["K"]
    root = normal(sequences, g, width, width) / width**0.5
    prior = {"prior.cross": drawn.pop("prior.mean"), "prior.gram": symmetric(root @ root.mT)}
    return drawn | {"mix": normal(*(size[x] for x in "BTG")).sigmoid()} | prior


PROBLEMS = {
    "ridge": Problem(
        design=GATED_KALMANET,
        draw=draw,
        idle=STILL,
        evidence_signal="k",
        certain_signals=({"obs_noise": 1e-5, "log_decay": 0.0}, {"obs_noise": 1e-5, "log_decay": -30.0}),
        slack=1e-6,
        ranges={"obs_noise": (SPEC.least_noise, MOST)},
        options={"ridge": Adaptive(10.0), "solver": Chebyshev(10)},  # 2 * 0.024^10 = 1e-16
    ),
}
