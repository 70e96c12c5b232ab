"""Problems of the laws: designs with random signals, and functions that draw them.

Each op defines its problems in `ops/_<op>/problems.py`.
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
MOST = 1e2  # largest variance
STILL = {"k": 0.0, "log_decay": 0.0}  # signals of idle tokens of a memory
HALVES = {"q", "k", "v", "precision"}  # signals in the case's dtype, the rest in the belief's


@dataclass(frozen=True)
class Problem:
    """Design, random signals and limits for the laws of an op.

    Attributes:
        design: design that the op filters.
        draw: function that draws signals and a prior in float64; a prior's tensors are named "prior.<field>".
        idle: signals of a token without evidence, decay and noise.
        evidence_signal: signal whose value 0 means no evidence; `None` if every token is evidence, as for a belief
            that stores all tokens.
        needs: features that a kernel must support.
        invariant: signals without a token axis.
        certain_signals: signals of nearly certain evidence, for which variances must stay positive.
        slack: largest negative eigenvalue of the covariance without process noise, relative to the largest eigenvalue.
        ranges: limits of variances and precisions; the lower one is documented by the op or by a layer that uses it.
        options: options of the design, with a solver that converges to the rounding error of every dtype.
        sizes: sizes of cases, if they differ from the defaults.
        interpreted: smaller sizes for Triton's interpreter. `None` skips the interpreter: another problem of the op and
            the kernels' own tests run it.
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
        """Type of the op's belief."""
        return OPS[self.design.op].belief

    def spectrum(self, belief: Any) -> Tensor:
        """Return the variances of a belief: those of its cells, or the eigenvalues of its covariance."""
        if "variance" in belief._fields:
            return belief.variance
        matrix = belief.gram if "gram" in belief._fields else belief.covariance
        return torch.linalg.eigvalsh(symmetric(matrix.double()))

    def learned(self, more: Any, less: Any) -> Any:
        """Return, as a belief, the variance that more evidence removes, or the information that it adds."""
        pairs = zip(more, less, strict=True) if "gram" in more._fields else zip(less, more, strict=True)
        return self.belief(*(x - y for x, y in pairs))


def draw_tokens(normal: Normal, size: dict[str, int]) -> Tensors:
    """Draw queries, keys and values."""
    b, t, h, g, k, v = (size[x] for x in "BTHGKV")
    return {"q": normal(b, t, h, k), "k": normal(b, t, h, k) / k**0.5, "v": normal(b, t, g, v)}


def draw_memory(**signals: str) -> Draw:
    """Return a function that draws signals of a memory, with layouts such as "B T G", and the mean of a prior.

    Log-decays are negative, angles have either sign, other signals are positive.
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
    """Return the problems of all ops by name. Names of the op `x` are "x" or begin with "x-"."""
    modules = [f"{op.folder}.problems" for op in OPS.values()]
    found = [import_module(module).PROBLEMS for module in modules if find_spec(module)]
    return {name: problem for problems in found for name, problem in problems.items()}
