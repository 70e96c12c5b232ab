"""Problems to try a kernel on: designs the oracle knows, and random signals for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kalmix import _filtering, designs
from kalmix._oracle import oracle
from kalmix.beliefs import DenseBelief, DiagonalBelief, HistoryBelief, PointBelief, RidgeBelief
from kalmix.designs import Design
from kalmix.kernels.kernel import Call, Kernel
from kalmix.ops import OPS
from kalmix.ops._dense import LEAST_NOISE
from kalmix.segments import Segments
from kalmix.solvers import Adaptive, Chebyshev
from kalmix.testing.budgets import DATA
from kalmix.types import Filtered, belief_dtype

Tensors = dict[str, Tensor]
Draw = Callable[[Callable[..., Tensor], int, dict[str, int]], Tensors]  # (normal, sequences, sizes B T H G K V)
HALVES = {"q", "k", "v", "precision"}  # signals in the case's dtype, the rest in the belief's


@dataclass(frozen=True)
class Problem:
    """What differs between ops, and between the transitions of an op.

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
        options: of the design, a solver that converges to every dtype's rounding among them.
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
    options: dict[str, Any] = field(default_factory=dict)
    interpreted: dict[str, int] | None = field(default_factory=dict)

    def spectrum(self, belief: Any) -> Tensor:
        """The variances of a belief: of its cells, or the eigenvalues of its covariance."""
        if self.belief is DiagonalBelief:
            return belief.variance
        matrix = belief.gram if self.belief is RidgeBelief else belief.covariance
        return torch.linalg.eigvalsh(_symmetric(matrix.double()))

    def learned(self, more: Any, less: Any) -> Any:
        """What a belief is surer of than another, as a belief: variances it has lost, or information it has gained."""
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


def _symmetric(x: Tensor) -> Tensor:
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

_POINT = partial(Problem, belief=PointBelief, idle=_STILL, silent="k")
_HISTORY = partial(
    Problem,
    design=designs.AFA,
    draw=_draw_history,
    belief=HistoryBelief,
    idle={},
    silent=None,
    invariant=("log_decay", "frequency", "process_noise", "key_noise", "query_noise"),
    sure=_HISTORY_SURE,
)
_DENSE = partial(Problem, belief=DenseBelief, silent="k", sure=_DENSE_SURE, slack=1e-7)

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


@dataclass(frozen=True)
class Case:
    """One kernel on one problem on one device in one dtype, and the sizes to try. Widths are odd on purpose."""

    name: str
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
        return f"{self.name}-{self.kernel}-{self.device}-{str(self.dtype).removeprefix('torch.')}"

    def having(self, **changes: Any) -> Case:
        return replace(self, **changes)

    @property
    def problem(self) -> Problem:
        return PROBLEMS[self.name]

    @property
    def op(self) -> str:
        return self.problem.design.op

    @property
    def row(self) -> Kernel:
        """The kernel's row in the table of its op."""
        return next(kernel for kernel in OPS[self.op].kernels if kernel.name == self.kernel)

    @property
    def refusal(self) -> str | None:
        """Why the kernel cannot serve this case, if it cannot."""
        widths = (self.key_width, self.value_width)
        return self.row.refuses(Call(self.device, self.dtype, *widths, self.length, self.problem.needs))

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter runs it: in numpy, so always to the same bits, and slowly."""
        return self.row.triton and self.device == "cpu"

    @property
    def carried(self) -> torch.dtype:
        return belief_dtype(self.dtype)

    @property
    def products(self) -> torch.dtype | None:
        """The dtype that the kernel rounds products to on the way, if it does."""
        return self.dtype if self.row.rounds_products and self.dtype != self.carried else None

    @property
    def quantities(self) -> list[str]:
        """What `outputs` lists."""
        read = ["mean", "variance"] if self.problem.design.uncertain else ["mean"]
        return [*read, *(f"belief.{field}" for field in self.problem.belief._fields)]

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

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        drawn = self.problem.draw(normal, self.batch if sequences is None else sequences, sizes)
        dtypes = {name: self.dtype if name in HALVES else self.carried for name in drawn}
        dtypes |= {name: x.dtype for name, x in drawn.items() if name in DATA}
        return {name: x.to(self.device, dtypes[name]) for name, x in drawn.items()}

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.batch, self.length, self.key_heads, self.value_heads, self.key_width, self.value_width)

    def _arguments(self, inputs: Tensors) -> dict[str, Any]:
        signals: dict[str, Any] = {name: x for name, x in inputs.items() if not name.startswith("prior.")}
        fields = [field for field in self.problem.belief._fields if f"prior.{field}" in inputs]
        # A covariance is symmetric, and so is its gradient: only that part of it is anybody's business.
        squares = ("covariance", "gram")
        priors = [(_symmetric if field in squares else _same)(inputs[f"prior.{field}"]) for field in fields]
        signals["variance"] = self.problem.design.uncertain
        return signals | self.problem.options | {"belief": self.problem.belief(*priors) if priors else None}

    def run(self, inputs: Tensors, segments: Segments | None = None) -> Filtered:
        """The kernel's answer."""
        return _filtering.filter(self.problem.design, **self._arguments(inputs), segments=segments, kernel=self.kernel)

    def lowered(self, inputs: Tensors) -> Tensors:
        """The signals as the op takes them (noises become gains), and the prior."""
        arguments = {name: x for name, x in self._arguments(inputs).items() if name not in ("belief", "variance")}
        q, k, v = (arguments.pop(name) for name in "qkv")
        signals = _filtering.lower(self.problem.design, k, v, arguments)
        tensors = {name: x for name, x in signals.items() if isinstance(x, Tensor)}
        return {"q": q, "k": k, "v": v} | tensors | {name: x for name, x in inputs.items() if name.startswith("prior.")}

    def run_lowered(self, lowered: Tensors, segments: Segments | None = None) -> Filtered:
        """The op's answer, given signals as it takes them."""
        arguments = self._arguments(lowered)
        if not self.problem.design.uncertain:
            del arguments["variance"]
        return OPS[self.op].function(**arguments, segments=segments, kernel=self.kernel)

    def specify(self, inputs: Tensors, segments: Segments | None = None) -> Filtered:
        """The oracle's answer, float64."""
        return oracle(self.problem.design, **self._arguments(inputs), segments=segments)

    def per_token(self, name: str) -> bool:
        """Whether a signal has a token axis."""
        return not name.startswith("prior.") and name not in self.problem.invariant

    def tokens(self, inputs: Tensors, start: int, stop: int) -> Tensors:
        """The signals of some tokens; everything that is not per token stays."""
        return {name: x[:, start:stop] if self.per_token(name) else x for name, x in inputs.items()}

    def one_sequence(self, inputs: Tensors, n: int, row: int, start: int, stop: int) -> Tensors:
        """The signals and the prior of one run alone."""
        part = self.tokens(inputs, start, stop)
        alone = {name: x[row : row + 1] if self.per_token(name) else x for name, x in part.items()}
        return alone | {name: x[n : n + 1] for name, x in inputs.items() if name.startswith("prior.")}


def _same(x: Tensor) -> Tensor:
    return x


def cases(devices: list[str], dtypes: tuple[torch.dtype, ...], **sizes: int) -> list[Case]:
    """Every kernel on every problem of its op that it serves."""
    tried = [
        Case(name, kernel.name, device, dtype, **sizes)
        for name, problem in PROBLEMS.items()
        for kernel in OPS[problem.design.op].kernels
        for device in devices
        for dtype in dtypes
    ]
    served = [(case, case.problem.interpreted if case.interpreted else {}) for case in tried if case.refusal is None]
    return [case.having(**spared) for case, spared in served if spared is not None]


def outputs(filtered: Filtered) -> list[Tensor]:
    """Mean, variance if there is one, and the belief's tensors, in a row."""
    read = [filtered.mean] if filtered.variance is None else [filtered.mean, filtered.variance]
    return [*read, *parts(filtered.belief)]


def parts(belief: Any) -> list[Tensor]:
    """A belief's tensors; of a history only slots that hold something, as how many are spare is nobody's business."""
    return list(belief.compact() if isinstance(belief, HistoryBelief) else belief)


def with_prior(inputs: Tensors, belief: Any) -> Tensors:
    """The same signals from another prior."""
    return inputs | {f"prior.{field}": part for field, part in zip(belief._fields, belief, strict=True)}
