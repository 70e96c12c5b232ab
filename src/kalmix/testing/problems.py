"""Problems to try kernels on: designs that the oracle knows, and random signals for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kalmix import designs
from kalmix.beliefs import DenseBelief, DiagonalBelief, HistoryBelief, PointBelief, RidgeBelief
from kalmix.designs import Design
from kalmix.ops._dense.api import LEAST_NOISE
from kalmix.ops._ridge.solvers import Adaptive, Chebyshev

Tensors = dict[str, Tensor]
Draw = Callable[[Callable[..., Tensor], int, dict[str, int]], Tensors]  # (normal, sequences, sizes B T H G K V)
HALVES = {"q", "k", "v", "precision"}  # signals in the case's dtype, the rest in the belief's


@dataclass(frozen=True)
class Problem:
    """Design, signals and limits with which the laws try an op.

    Attributes:
        design: a design of the op.
        draw: random signals and a random prior, float64.
        belief: the belief type; a prior's tensors are the signals named "prior.<field>".
        idle: signals that say nothing: no evidence, no decay, no noise.
        silent: the signal that is no evidence where it is 0; `None` where every token says something, as a belief that
            is a history keeps them all.
        needs: what it asks of a kernel that only some serve.
        invariant: signals without a token axis.
        sure: signals of near-certain evidence under which variances must stay positive.
        slack: how negative an eigenvalue of the covariance may be without process noise, relative to the largest.
        ranges: from where to where variances and precisions may go: the least is what the op, or a layer that uses it,
            documents.
        options: of the design, a solver that converges to every dtype's rounding among them.
        sizes: those to try, where they are not the usual ones.
        interpreted: sizes that Triton's interpreter is tried with, where the usual ones take it too long; `None` if it
            is not tried at all, as the op has another problem and its kernels tests of their own.
    """

    design: Design
    draw: Draw
    belief: type
    idle: dict[str, float]
    silent: str | None
    needs: frozenset[str] = frozenset()
    invariant: tuple[str, ...] = ()
    sure: tuple[dict[str, float], ...] = ()
    slack: float = 0.0
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    interpreted: dict[str, int] | None = field(default_factory=dict)

    def spectrum(self, belief: Any) -> Tensor:
        """The variances of a belief: of its cells, or the eigenvalues of its covariance."""
        if self.belief is DiagonalBelief:
            return belief.variance
        matrix = belief.gram if self.belief is RidgeBelief else belief.covariance
        return torch.linalg.eigvalsh(symmetric(matrix.double()))

    def learned(self, more: Any, less: Any) -> Any:
        """Return, as a belief, the variance that one belief lost against another, or the information it gained."""
        pairs = zip(more, less, strict=True) if self.belief is RidgeBelief else zip(less, more, strict=True)
        return self.belief(*(x - y for x, y in pairs))


def _draw_cells(normal: Callable[..., Tensor], sequences: int, size: dict[str, int]) -> Tensors:
    b, t, g, k, v = (size[x] for x in "BTGKV")
    return _draw_tokens(normal, size) | {
        "precision": normal(b, t, g, v).exp(),
        "log_decay": -0.2 * normal(g, k, v).exp(),
        "process_noise": 0.1 * normal(g, k, v).exp(),
        "prior.mean": normal(sequences, g, k, v),
        "prior.variance": normal(sequences, g, k, v).exp(),
    }


def _draw_tokens(normal: Callable[..., Tensor], size: dict[str, int]) -> Tensors:
    b, t, h, g, k, v = (size[x] for x in "BTHGKV")
    return {"q": normal(b, t, h, k), "k": normal(b, t, h, k) / k**0.5, "v": normal(b, t, g, v)}


def _draw_memory(**signals: str) -> Draw:
    """Signals of a memory, each "B T G" or so: log-decays negative, angles any, the rest positive."""

    def draw(normal: Callable[..., Tensor], sequences: int, size: dict[str, int]) -> Tensors:
        drawn = _draw_tokens(normal, size)
        for name, layout in signals.items():
            x = normal(*((size | {"P": size["K"] // 2})[letter] for letter in layout.split()))
            drawn[name] = x if name == "angle" else _SCALES.get(name, 1.0) * x.exp()
        drawn["prior.mean"] = normal(sequences, *(size[x] for x in "GKV"))
        return drawn

    return draw


_SCALES = {"log_decay": -0.2, "process_noise": 0.1}


def _draw_dense(**signals: str) -> Draw:
    draw_memory = _draw_memory(**signals)

    def draw(normal: Callable[..., Tensor], sequences: int, size: dict[str, int]) -> Tensors:
        if "angle" in signals:
            size = size | {"K": size["K"] + size["K"] % 2}
        drawn, width = draw_memory(normal, sequences, size), size["K"]
        root = normal(sequences, size["G"], width, width) / width**0.5
        drawn["prior.covariance"] = root @ root.mT + 0.1 * torch.eye(width, dtype=root.dtype)
        if "angle" in signals:  # the second half is hidden
            for name in ("q", "k"):
                drawn[name][..., width // 2 :] = 0
        return drawn

    return draw


def _draw_ridge(normal: Callable[..., Tensor], sequences: int, size: dict[str, int]) -> Tensors:
    drawn = _draw_memory(obs_noise="B T G", log_decay="B T G")(normal, sequences, size)
    g, width = size["G"], size["K"]
    root = normal(sequences, g, width, width) / width**0.5
    prior = {"prior.cross": drawn.pop("prior.mean"), "prior.gram": root @ root.mT}
    return drawn | {"mix": normal(*(size[x] for x in "BTG")).sigmoid()} | prior


def _draw_looks(normal: Callable[..., Tensor], sequences: int, size: dict[str, int]) -> Tensors:
    """Looks at a state at times that stand still and go on; nothing seen before."""
    b, t, h, width = (size[x] for x in "BTHK")
    width += width % 2
    noises, drawn = ("process_noise", "key_noise", "query_noise"), _draw_tokens(normal, size | {"K": width, "V": width})
    return drawn | {
        "q": drawn["q"] / width**0.5,
        "log_decay": -0.2 * normal(h).exp(),
        "frequency": normal(h, width // 2),
        **{name: normal(h).exp() for name in noises},
        "times": (normal(b, t) + 0.5).clamp(min=0).cumsum(1),
    }


def _draw_history(normal: Callable[..., Tensor], sequences: int, size: dict[str, int]) -> Tensors:
    """Looks after others, in slots of which some are to spare."""
    drawn, h, g = _draw_looks(normal, sequences, size), size["H"], size["G"]
    width, slots = drawn["k"].shape[3], torch.tensor([[0, 1, 2, 3, 4], [-1, 0, -1, 1, 2], [-1, -1, -1, -1, -1]])
    return drawn | {
        "prior.keys": normal(sequences, 5, h, width),
        "prior.values": normal(sequences, 5, g, width),
        "prior.times": -normal(sequences, 5).abs().cumsum(1).flip(1),
        "prior.positions": slots[torch.arange(sequences) % 3],
    }


def symmetric(x: Tensor) -> Tensor:
    return (x + x.mT) / 2


_STILL = {"k": 0.0, "log_decay": 0.0}
_DENSE_SURE = tuple(
    {"obs_noise": LEAST_NOISE[torch.float32], "log_decay": decay, "process_noise": noise}
    for decay, noise in ((0.0, 0.0), (0.0, 1e-6), (0.0, 1.0), (-30.0, 0.0), (-1e-3, 1e-6))
)

_HISTORY_SURE = tuple(
    {"key_noise": 1e-5, "query_noise": 0.0, "log_decay": decay, "process_noise": noise}
    for decay, noise in ((0.0, 0.0), (0.0, 1.0), (-30.0, 0.0), (-1e-3, 1e-6))
)

_MOST = 1e2
_FLOOR = 1e-4  # of the layers' noises: `layers/parametrize.py`
_DOCUMENTED = (_FLOOR, _MOST)
_NOISES = {"obs_noise": _DOCUMENTED, "write_variance": _DOCUMENTED, "reset": _DOCUMENTED}
_RESOLVED = (1.001 * LEAST_NOISE[torch.float32], _MOST)

_POINT = partial(Problem, belief=PointBelief, idle=_STILL, silent="k", ranges=_NOISES)
_HISTORY = partial(
    Problem,
    design=designs.AFA,
    draw=_draw_history,
    belief=HistoryBelief,
    idle={},
    silent=None,
    invariant=("log_decay", "frequency", "process_noise", "key_noise", "query_noise"),
    sure=_HISTORY_SURE,
    ranges={"key_noise": (1e-5, _MOST), "query_noise": (1e-5, _MOST), "process_noise": (1e-5, _MOST)},
)
# Some kernels filter keys narrower than 16 in float64, and Triton is not preferred for those narrower than 8.
_DENSE = partial(
    Problem,
    belief=DenseBelief,
    silent="k",
    sure=_DENSE_SURE,
    slack=1e-7,
    ranges={"obs_noise": _RESOLVED, "process_noise": (1e-6, _MOST)},
    sizes={"key_width": 17},
    interpreted={"key_width": 9, "value_heads": 1, "length": 17},
)

PROBLEMS = {
    "additive": _POINT(
        design=designs.MAMBA2,
        draw=_draw_memory(obs_noise="B T G", write_variance="B T G", log_decay="B T G"),
    ),
    "additive-keys": _POINT(
        design=designs.GLA,
        draw=_draw_memory(obs_noise="B T G", write_variance="B T G", log_decay="B T G K"),
    ),
    "delta": _POINT(
        design=designs.GATED_DELTANET,
        draw=_draw_memory(obs_noise="B T G", reset="B T G", log_decay="B T G"),
    ),
    "delta-keys": _POINT(
        design=designs.KDA,
        draw=_draw_memory(obs_noise="B T G", reset="B T G K", log_decay="B T G K"),
    ),
    "diagonal": Problem(
        design=designs.KLA,
        draw=_draw_cells,
        belief=DiagonalBelief,
        idle={"precision": 0.0, "log_decay": 0.0, "process_noise": 0.0},
        silent="precision",
        invariant=("log_decay", "process_noise"),
        sure=tuple(
            {"precision": 1e4, "log_decay": decay, "process_noise": noise}
            for decay, noise in ((0.0, 0.0), (0.0, 1.0), (-30.0, 0.0), (-1e-3, 1e3))
        ),
        ranges={"precision": (1 / _MOST, 1 / _FLOOR), "process_noise": (1e-6, _MOST)},
    ),
    "dense": _DENSE(
        design=designs.BAYESIAN,
        draw=_draw_dense(obs_noise="B T G", process_noise="B T G", log_decay="B T G K"),
        idle=_STILL | {"process_noise": 0.0},
    ),
    "dense-turning": _DENSE(
        design=designs.BAYESIAN,
        draw=_draw_dense(obs_noise="B T G", process_noise="B T G", log_decay="B T G P", angle="B T G P"),
        idle=_STILL | {"process_noise": 0.0, "angle": 0.0},
        needs=frozenset({"rotations"}),
    ),
    "ridge": Problem(
        design=designs.GATED_KALMANET,
        draw=_draw_ridge,
        belief=RidgeBelief,
        idle=_STILL,
        silent="k",
        sure=({"obs_noise": 1e-5, "log_decay": 0.0}, {"obs_noise": 1e-5, "log_decay": -30.0}),
        slack=1e-6,
        ranges={"obs_noise": (_FLOOR, _MOST)},
        options={"ridge": Adaptive(10.0), "solver": Chebyshev(10)},  # 2 * 0.024^10 = 1e-16
    ),
    "attend": _HISTORY(interpreted={"value_heads": 1, "length": 11}),
    "attend-window": _HISTORY(
        draw=_draw_looks,
        options={"weight": "exponential", "window": 6, "nu": 2.0, "temperature": 0.7, "floor": 0.1},
        sure=({"key_noise": 1e-5, "query_noise": 1.0, "log_decay": -1e-3, "process_noise": 0.0},),
        interpreted=None,
    ),
}
