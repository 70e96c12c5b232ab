"""Problems to try a kernel on: for each op, a design the oracle knows and random signals for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kalmix import designs
from kalmix._oracle import oracle
from kalmix.beliefs import DiagonalBelief
from kalmix.designs import Design
from kalmix.ops import OPS
from kalmix.segments import Segments
from kalmix.types import Filtered, belief_dtype

Tensors = dict[str, Tensor]
PER_TOKEN = {"q", "k", "v", "precision"}


@dataclass(frozen=True)
class Problem:
    """What differs between ops: the design that specifies it, its signals and its belief.

    Attributes:
        design: the most general design of the op.
        draw: random signals and a random prior, float64, from (generator, sequences, sizes B T H G K V).
        belief: the belief type; a prior's tensors are the signals named "prior.<field>".
        variances: fields of the belief that may not be negative.
        idle: signals that say nothing: no evidence, no decay, no noise.
    """

    design: Design
    draw: Callable[[torch.Generator, int, dict[str, int]], Tensors]
    belief: type
    variances: tuple[str, ...]
    idle: dict[str, float]


def _draw_diagonal(generator: torch.Generator, sequences: int, size: dict[str, int]) -> Tensors:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    b, t, h, g, k, v = (size[x] for x in "BTHGKV")
    return {
        "q": normal(b, t, h, k),
        "k": normal(b, t, h, k) / k**0.5,
        "v": normal(b, t, g, v),
        "precision": normal(b, t, g, v).exp(),
        "log_decay": -0.2 * normal(g, k, v).exp(),
        "process_noise": 0.1 * normal(g, k, v).exp(),
        "prior.mean": normal(sequences, g, k, v),
        "prior.variance": normal(sequences, g, k, v).exp(),
    }


PROBLEMS = {
    "diagonal": Problem(
        design=designs.KLA,
        draw=_draw_diagonal,
        belief=DiagonalBelief,
        variances=("variance",),
        idle={"precision": 0.0, "log_decay": 0.0, "process_noise": 0.0},
    ),
}


@dataclass(frozen=True)
class Case:
    """One kernel of one op on one device in one dtype, and the sizes to try. Widths are odd on purpose."""

    op: str
    kernel: str
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    batch: int = 2
    length: int = 19
    key_heads: int = 1
    value_heads: int = 2
    key_width: int = 3
    value_width: int = 5
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.op}-{self.kernel}-{self.device}-{str(self.dtype).removeprefix('torch.')}"

    def having(self, **changes: Any) -> Case:
        return replace(self, **changes)

    @property
    def problem(self) -> Problem:
        return PROBLEMS[self.op]

    @property
    def carried(self) -> torch.dtype:
        return belief_dtype(self.dtype)

    @property
    def quantities(self) -> list[str]:
        """What `outputs` lists."""
        return ["mean", "variance", *(f"belief.{field}" for field in self.problem.belief._fields)]

    def segments(self, rows: list[tuple[int, int, int]]) -> Segments:
        return Segments.of(torch.tensor(rows, dtype=torch.int32, device=self.device))

    def packing(self) -> Segments:
        """Runs with a gap, an empty one, one that ends early and one that starts late, over two batch rows."""
        third, end = self.length // 3, self.length
        return self.segments([(0, 0, third), (0, third, third), (0, third + 1, end), (1, 1, end - 2)])

    def inputs(self, sequences: int | None = None) -> Tensors:
        """Signals and a prior, in this case's dtypes, on its device."""
        sizes = dict(zip("BTHGKV", self.sizes, strict=True))
        generator = torch.Generator().manual_seed(self.seed)
        drawn = self.problem.draw(generator, self.batch if sequences is None else sequences, sizes)
        dtypes = {name: self.dtype if name in PER_TOKEN else self.carried for name in drawn}
        return {name: x.to(self.device, dtypes[name]) for name, x in drawn.items()}

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.batch, self.length, self.key_heads, self.value_heads, self.key_width, self.value_width)

    def _arguments(self, inputs: Tensors) -> dict[str, Any]:
        signals: dict[str, Any] = {name: x for name, x in inputs.items() if not name.startswith("prior.")}
        priors = [inputs[f"prior.{field}"] for field in self.problem.belief._fields if f"prior.{field}" in inputs]
        return signals | {"belief": self.problem.belief(*priors) if priors else None}

    def run(self, inputs: Tensors, segments: Segments | None = None) -> Filtered:
        """The kernel's answer."""
        arguments = self._arguments(inputs)
        return OPS[self.op].function(**arguments, variance=True, segments=segments, kernel=self.kernel)

    def specify(self, inputs: Tensors, segments: Segments | None = None) -> Filtered:
        """The oracle's answer, float64."""
        arguments = self._arguments(inputs)
        return oracle(self.problem.design, **arguments, variance=True, segments=segments)


def outputs(filtered: Filtered) -> list[Tensor]:
    """Mean, variance and the belief's tensors, in a row."""
    read = [filtered.mean] if filtered.variance is None else [filtered.mean, filtered.variance]
    return [*read, *filtered.belief]


def tokens(inputs: Tensors, start: int, stop: int) -> Tensors:
    """The signals of some tokens; everything that is not per token stays."""
    return {name: x[:, start:stop] if name in PER_TOKEN else x for name, x in inputs.items()}


def one_sequence(inputs: Tensors, n: int, row: int, start: int, stop: int) -> Tensors:
    """The signals and the prior of one run alone."""
    alone = {name: x[row : row + 1] if name in PER_TOKEN else x for name, x in tokens(inputs, start, stop).items()}
    return alone | {name: x[n : n + 1] for name, x in inputs.items() if name.startswith("prior.")}


def with_prior(inputs: Tensors, belief: Any) -> Tensors:
    """The same signals from another prior."""
    return inputs | {f"prior.{field}": part for field, part in zip(belief._fields, belief, strict=True)}
