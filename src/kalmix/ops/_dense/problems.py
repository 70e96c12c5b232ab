"""Test problems of `dense`: designs and random signals, used by the laws, `kalmix doctor` and the fuzz script."""

from __future__ import annotations

from functools import partial

import torch

from kalmix.designs import BAYESIAN
from kalmix.ops._dense.spec import SPEC
from kalmix.testing.problems import MOST, STILL, Draw, Normal, Problem, Tensors, draw_memory, symmetric


def draw_dense(**signals: str) -> Draw:
    """Return a function that draws signals of `dense`, with layouts such as "B T G", and a prior."""
    memory = draw_memory(**signals)

    def draw(normal: Normal, sequences: int, size: dict[str, int]) -> Tensors:
        if "angle" in signals:
            size = size | {"K": size["K"] + size["K"] % 2}
        drawn, width = memory(normal, sequences, size), size["K"]
        root = normal(sequences, size["G"], width, width) / width**0.5
        # A product of matrices is symmetric only up to rounding, and on some CPUs not to the last bit.
        drawn["prior.covariance"] = symmetric(root @ root.mT) + 0.1 * torch.eye(width, dtype=root.dtype)
        if "angle" in signals:  # the second half of the rows is hidden
            for name in ("q", "k"):
                drawn[name][..., width // 2 :] = 0
        return drawn

    return draw


_SURE = tuple(
    {"obs_noise": SPEC.least_noise, "log_decay": decay, "process_noise": noise}
    for decay, noise in ((0.0, 0.0), (0.0, 1e-6), (0.0, 1.0), (-30.0, 0.0), (-1e-3, 1e-6))
)

# Kernel "chunked" uses float64 for keys narrower than 16; "triton" is not preferred for keys narrower than 8.
_DENSE = partial(
    Problem,
    design=BAYESIAN,
    evidence_signal="k",
    certain_signals=_SURE,
    slack=1e-7,
    ranges={"obs_noise": (1.001 * SPEC.least_noise, MOST), "process_noise": (1e-6, MOST)},
    sizes={"key_width": 17},
    interpreted={"key_width": 9},
)

PROBLEMS = {
    "dense": _DENSE(
        draw=draw_dense(obs_noise="B T G", process_noise="B T G", log_decay="B T G K"),
        idle=STILL | {"process_noise": 0.0},
    ),
    "dense-heads": _DENSE(
        draw=draw_dense(obs_noise="B T G", process_noise="B T G", log_decay="B T G"),
        idle=STILL | {"process_noise": 0.0},
        interpreted=None,
    ),
    "dense-turning": _DENSE(
        draw=draw_dense(obs_noise="B T G", process_noise="B T G", log_decay="B T G P", angle="B T G P"),
        idle=STILL | {"process_noise": 0.0, "angle": 0.0},
        needs=frozenset({"rotations"}),
    ),
}
