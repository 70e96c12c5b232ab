"""Parts of law problems: designs that the oracle knows, and random signals for them.

The problems themselves are in the folders of the ops, `ops/_<op>/problems.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kalmix.designs import Design
from kalmix.ops import OPS

Tensors = dict[str, Tensor]
Normal = Callable[..., Tensor]  # from a shape to normal numbers
Draw = Callable[[Normal, int, dict[str, int]], Tensors]  # (normal, sequences, sizes B T H G K V)
MOST = 1e2  # of a variance
STILL = {"k": 0.0, "log_decay": 0.0}  # idle tokens of a memory
HALVES = {"q", "k", "v", "precision"}  # signals in the case's dtype, the rest in the belief's


@dataclass(frozen=True)
class Problem:
    """Design, signals and limits with which the laws try an op.

    Attributes:
        design: a design of the op.
        draw: random signals and a random prior, float64; a prior's tensors are the signals named "prior.<field>".
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
    idle: dict[str, float]
    evidence_signal: str | None
    needs: frozenset[str] = frozenset()
    invariant: tuple[str, ...] = ()
    certain_signals: tuple[dict[str, float], ...] = ()
    slack: float = 0.0
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    interpreted: dict[str, int] | None = field(default_factory=dict)

    @property
    def belief(self) -> type:
        """The type of the op's belief."""
        return OPS[self.design.op].belief

    def spectrum(self, belief: Any) -> Tensor:
        """Return the variances of a belief: those of its cells, or the eigenvalues of its covariance."""
        if "variance" in belief._fields:
            return belief.variance
        matrix = belief.gram if "gram" in belief._fields else belief.covariance
        return torch.linalg.eigvalsh(symmetric(matrix.double()))

    def learned(self, more: Any, less: Any) -> Any:
        """Return the variance that one belief lost against another, or the information it gained, as a belief."""
        pairs = zip(more, less, strict=True) if "gram" in more._fields else zip(less, more, strict=True)
        return self.belief(*(x - y for x, y in pairs))


def draw_tokens(normal: Normal, size: dict[str, int]) -> Tensors:
    """Draw queries, keys and values."""
    b, t, h, g, k, v = (size[x] for x in "BTHGKV")
    return {"q": normal(b, t, h, k), "k": normal(b, t, h, k) / k**0.5, "v": normal(b, t, g, v)}


def draw_memory(**signals: str) -> Draw:
    """Return a function that draws signals of a memory, each "B T G" or so, and the mean of a prior.

    Log-decays are negative, angles may have either sign, the rest is positive.
    """

    def draw(normal: Normal, sequences: int, size: dict[str, int]) -> Tensors:
        drawn = draw_tokens(normal, size)
        for name, layout in signals.items():
            x = normal(*((size | {"P": size["K"] // 2})[letter] for letter in layout.split()))
            drawn[name] = x if name == "angle" else _SCALES.get(name, 1.0) * x.exp()
        drawn["prior.mean"] = normal(sequences, *(size[x] for x in "GKV"))
        return drawn

    return draw


_SCALES = {"log_decay": -0.2, "process_noise": 0.1}


def noise_ranges(least: float) -> dict[str, tuple[float, float]]:
    """Return the ranges of a memory's variances, from the least noise of its op."""
    return dict.fromkeys(("obs_noise", "write_variance", "reset"), (least, MOST))


def symmetric(x: Tensor) -> Tensor:
    return (x + x.mT) / 2


def collect() -> dict[str, Problem]:
    """Return the problems of all ops by name: of an op `x` "x" or "x-...". An op without a problem fails the laws."""
    modules = [f"{op.folder}.problems" for op in OPS.values()]
    found = [import_module(module).PROBLEMS for module in modules if find_spec(module)]
    return {name: problem for problems in found for name, problem in problems.items()}
