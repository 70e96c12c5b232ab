"""Cases of the laws: one kernel on one problem, its inputs, and calls of the kernel and of the oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kalmix import filtering as _filtering
from kalmix._oracle import oracle
from kalmix.beliefs import HistoryBelief
from kalmix.ops import OPS, Dynamics
from kalmix.ops._shared.kernel import Kernel, KernelRequest
from kalmix.segments import Segments
from kalmix.testing.problems import HALVES, Normal, Problem, Tensors, collect, symmetric
from kalmix.testing.tolerances import DATA
from kalmix.types import Filtered, belief_dtype

PROBLEMS = collect()
OF_VALUES = "value_dynamics."  # prefix of inputs that are fields of `Dynamics`


@dataclass(frozen=True)
class Case:
    """One kernel on one problem, device and dtype, with sizes. Widths are odd to test partial tiles."""

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

    def with_changes(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def with_min_width(self) -> Case:
        """Return the case with keys that are wide enough for the kernel."""
        return self.with_changes(key_width=max(self.key_width, self.row.min_key_width))

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
    def unsupported_reason(self) -> str | None:
        """Reason why the kernel does not support this case, or `None`."""
        widths = (self.key_width, self.value_width)
        return self.row.unsupported_reason(
            KernelRequest(self.device, self.dtype, *widths, self.length, self.problem.needs)
        )

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter runs the kernel: slowly, in NumPy, with equal bits in each run."""
        return self.row.triton and self.device == "cpu"

    @property
    def state_dtype(self) -> torch.dtype:
        return belief_dtype(self.dtype)

    @property
    def product_dtype(self) -> torch.dtype | None:
        """Half-precision dtype to which the kernel rounds products, or `None`."""
        return self.dtype if self.row.low_precision_products and self.dtype != self.state_dtype else None

    @property
    def quantities(self) -> list[str]:
        """Names of the tensors that `outputs` returns."""
        read = ["mean", "variance"] if self.problem.design.has_variance else ["mean"]
        return [*read, *(f"belief.{field}" for field in self.problem.belief._fields)]

    def segments(self, rows: list[tuple[int, int, int]]) -> Segments:
        return Segments.of(torch.tensor(rows, dtype=torch.int32, device=self.device).view(-1, 3))

    def packing(self) -> Segments:
        """Return segments over two batch rows: with a gap, one empty, one that ends early and one that starts late."""
        third, end = self.length // 3, self.length
        return self.segments([(0, 0, third), (0, third, third), (0, third + 1, end), (1, 1, end - 2)])

    def inputs(self, sequences: int | None = None) -> Tensors:
        """Return random signals and a prior, in this case's dtypes and on its device."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        return self.inputs_from(normal, sequences)

    def inputs_from(self, normal: Normal, sequences: int | None = None) -> Tensors:
        """Return signals and a prior computed from the numbers of `normal`, a function of a shape."""
        sizes = dict(zip("BTHGKV", self.sizes, strict=True))
        signals = self.problem.draw(normal, self.batch if sequences is None else sequences, sizes)
        dtypes = {name: self.dtype if name in HALVES else self.state_dtype for name in signals}
        dtypes |= {name: x.dtype for name, x in signals.items() if name in DATA}
        return {name: x.to(self.device, dtypes[name]) for name, x in signals.items()}

    def wide_inputs(self, sequences: int | None = None) -> Tensors:
        """Return signals with variances log-uniform over the documented range, and gates that are often 0 or 1."""
        inputs, generator = self.inputs(sequences), torch.Generator().manual_seed(self.seed + 3)

        def uniform(x: Tensor) -> Tensor:
            return torch.rand(x.shape, generator=generator, dtype=torch.float64)

        for name, (least, most) in self.problem.ranges.items():
            if name in inputs:
                inputs[name] = (least * (most / least) ** uniform(inputs[name])).to(inputs[name])
        smallest = 0.9 * torch.finfo(self.dtype).min  # masks often hold the smallest number; twice it overflows
        for name, gates in {"log_decay": (0.0, smallest), "mix": (0.0, 1.0)}.items():
            if name in inputs and self.is_per_token(name):
                signals, x = uniform(inputs[name]).to(self.device), inputs[name]
                inputs[name] = torch.where(signals < 0.2, gates[0], torch.where(signals > 0.8, gates[1], x))
        return inputs

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.batch, self.length, self.key_heads, self.value_heads, self.key_width, self.value_width)

    def arguments(self, inputs: Tensors) -> dict[str, Any]:
        """Return the arguments of `kalmix.filter` beside the design."""
        signals: dict[str, Any] = {name: x for name, x in inputs.items() if "." not in name}
        values = {name.removeprefix(OF_VALUES): x for name, x in inputs.items() if name.startswith(OF_VALUES)}
        if values:
            signals["value_dynamics"] = Dynamics(**values)
        fields = [field for field in self.problem.belief._fields if f"prior.{field}" in inputs]
        # Only the symmetric part of the gradient of a covariance is defined.
        squares = ("covariance", "gram")
        priors = [(symmetric if field in squares else _same)(inputs[f"prior.{field}"]) for field in fields]
        signals["variance"] = self.problem.design.has_variance
        return signals | self.problem.options | {"belief": self.problem.belief(*priors) if priors else None}

    def run(self, inputs: Tensors, segments: Segments | None = None) -> Filtered:
        """Filter by the kernel."""
        return _filtering.filter(self.problem.design, **self.arguments(inputs), segments=segments, kernel=self.kernel)

    def op_inputs(self, inputs: Tensors) -> Tensors:
        """Return the prior and the signals as arguments of the op: noises become gains."""
        arguments = {name: x for name, x in self.arguments(inputs).items() if name not in ("belief", "variance")}
        q, k, v = (arguments.pop(name) for name in "qkv")
        signals = _filtering.lower(self.problem.design, k, v, arguments)
        tensors = {name: x for name, x in signals.items() if isinstance(x, Tensor)}
        return {"q": q, "k": k, "v": v} | tensors | {name: x for name, x in inputs.items() if "." in name}

    def run_op(self, inputs: Tensors, segments: Segments | None = None) -> Filtered:
        """Call the op by the kernel, with signals from `op_inputs`."""
        arguments = self.arguments(inputs)
        if not self.problem.design.has_variance:
            del arguments["variance"]
        return OPS[self.op].function(**arguments, segments=segments, kernel=self.kernel)

    def run_oracle(self, inputs: Tensors, segments: Segments | None = None) -> Filtered:
        """Filter by the oracle, in float64."""
        return oracle(self.problem.design, **self.arguments(inputs), segments=segments)

    def is_per_token(self, name: str) -> bool:
        """Return whether a signal has a token axis."""
        return not name.startswith("prior.") and name not in self.problem.invariant

    def tokens(self, inputs: Tensors, start: int, stop: int) -> Tensors:
        """Return the signals of tokens `start` to `stop - 1`, and all signals without a token axis."""
        return {name: x[:, start:stop] if self.is_per_token(name) else x for name, x in inputs.items()}

    def one_sequence(self, inputs: Tensors, n: int, row: int, start: int, stop: int) -> Tensors:
        """Return the signals and the prior of sequence `n`, at tokens `start` to `stop - 1` of a batch row."""
        part = self.tokens(inputs, start, stop)
        alone = {name: x[row : row + 1] if self.is_per_token(name) else x for name, x in part.items()}
        return alone | {name: x[n : n + 1] for name, x in inputs.items() if name.startswith("prior.")}


def _same(x: Tensor) -> Tensor:
    return x


def cases(devices: list[str], dtypes: tuple[torch.dtype, ...], **sizes: int) -> list[Case]:
    """Return a case for each kernel and each problem of its op that it supports, with keys of its minimum width."""
    candidates = [
        Case(name, kernel.name, device, dtype, **(problem.sizes | sizes)).with_min_width()
        for name, problem in PROBLEMS.items()
        for kernel in OPS[problem.design.op].kernels
        for device in devices
        for dtype in dtypes
    ]
    supported = [
        (case, case.problem.interpreted if case.interpreted else {})
        for case in candidates
        if case.unsupported_reason is None
    ]
    return [case.with_changes(**limits) for case, limits in supported if limits is not None]


def outputs(filtered: Filtered) -> list[Tensor]:
    """Return mean, variance if there is one, and the belief's tensors as one list."""
    read = [filtered.mean] if filtered.variance is None else [filtered.mean, filtered.variance]
    return [*read, *parts(filtered.belief)]


def parts(belief: Any) -> list[Tensor]:
    """Return a belief's tensors; of a history only the slots in use, since kernels may allocate others."""
    return list(belief.compact() if isinstance(belief, HistoryBelief) else belief)


def with_prior(inputs: Tensors, belief: Any) -> Tensors:
    """Return the signals with `belief` as the prior."""
    return inputs | {f"prior.{field}": part for field, part in zip(belief._fields, belief, strict=True)}
