"""Compare kernels with float64 at all launch configurations, at real sizes and at the limits of their inputs.

    python -m kalmix_bench.perf.accuracy             # a GPU if there is one, otherwise the CPU (small sizes)
    python -m kalmix_bench.perf.accuracy --op delta --start 62  # another op; from trial 62 on

Outputs and all gradients are compared in norm with their computed tolerances (`kalmix.testing.tolerances`). The
reference is the chunked kernel in float64, which the laws compare with the oracle. Exit status 1 if an error exceeds
its tolerance.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from kalmix import Segments
from kalmix.ops import OPS
from kalmix.testing.cases import PROBLEMS, Case, outputs
from kalmix.testing.measure import Measurement, compare, differentiable, vjp
from kalmix.testing.tolerances import Tensors, budgets

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Trial:
    """One call: sizes, and signals that are set to a value (others are random)."""

    problem: str
    batch: int
    length: int
    key_width: int
    value_width: int
    heads: tuple[int, int] = (1, 1)
    packed: bool = False
    dtype: torch.dtype = torch.float32
    overrides: dict[str, float] = field(default_factory=dict)

    def case(self, kernel: str, device: str) -> Case:
        sizes = {"batch": self.batch, "length": self.length, "key_width": self.key_width}
        heads = dict(zip(("key_heads", "value_heads"), self.heads, strict=True))
        return Case(self.problem, kernel, device, self.dtype, value_width=self.value_width, **sizes, **heads)

    def inputs(self, case: Case) -> tuple[Tensors, Segments | None]:
        segments = case.packing() if self.packed else None
        inputs = case.inputs(sequences=segments and segments.count)
        return inputs | {name: torch.full_like(inputs[name], x) for name, x in self.overrides.items()}, segments


def diagonal_trials(small: bool) -> Iterator[Trial]:
    """Yield trials of `diagonal`."""
    trial = partial(Trial, "diagonal")
    long, wide = (200, 33) if small else (2048, 1361)
    for slots in (1, 3, 8, 16, 24, 32, 64, 100, 128):
        yield trial(2, 77, slots, 37)
        yield trial(2, 330, slots, 37, packed=True)
        yield trial(2, long, slots, wide)
        yield trial(2, long, slots, 130, heads=(2, 4), packed=True)
    for dtype in HALVES:
        for slots in (8, 32, 128):
            yield trial(2, long, slots, 129, dtype=dtype, packed=slots == 32)
    edges: list[dict[str, float]] = [{"process_noise": 0.0}, {"process_noise": 1e3}, {"log_decay": 0.0}]
    edges += [{"precision": 0.0}, {"precision": 1e4}, {"log_decay": -30.0}, {"log_decay": 0.0, "process_noise": 0.0}]
    for decay, noise in ((0.0, 0.0), (0.0, 1e3), (-30.0, 1e-6)):
        edges.append({"precision": 1e4, "log_decay": decay, "process_noise": noise})
    for edge in edges:
        for packed in (False, True):
            yield trial(2, long, 16, 96, packed=packed, overrides=edge)
    if not small:
        for slots in (16, 32):
            yield trial(1, 65_536, slots, 96)
            yield trial(1, 65_536, slots, 96, overrides={"log_decay": 0.0, "process_noise": 0.0})
            yield trial(4, 4096, slots, 496)
        yield trial(64, 512, 32, 512)


def memory_trials(problem: str, small: bool) -> Iterator[Trial]:
    """Yield trials of an op whose state is a memory."""
    trial = partial(Trial, problem)
    long = 100 if small else 1024
    for width in (1, 5, 16, 24, 32, 64, 100, 128, 200, 256):
        if small and width > 64:
            continue
        yield trial(2, 77, width, 37)
        yield trial(2, 330, width, width + 3, packed=True)
        yield trial(2, long, width, width, heads=(2, 4), packed=width % 3 == 1)
        for dtype in HALVES:
            yield trial(2, long, width, width, heads=(2, 4), packed=width % 3 == 2, dtype=dtype)
    edges: list[dict[str, float]] = [{"log_decay": 0.0}, {"log_decay": -30.0}, {"log_decay": -1e3}]
    edges += [{"obs_noise": 1e-5}, {"obs_noise": 1e5}] if PROBLEMS[problem].design.op != "additive" else []
    if PROBLEMS[problem].design.op == "dense":
        edges += [{"process_noise": 0.0}, {"process_noise": 1e-6, "obs_noise": 1e-5, "log_decay": 0.0}]
    for edge in edges:
        yield trial(2, long, 64, 64, overrides=edge)
        yield trial(2, long, 48, 80, overrides=edge, packed=True)
    if not small:
        yield trial(1, 65_536, 64, 64)
        yield trial(4, 4096, 128, 128, heads=(16, 16), dtype=torch.bfloat16)


def attend_trials(problem: str, small: bool) -> Iterator[Trial]:
    """Yield trials of an op whose state is its history."""
    trial = partial(Trial, problem)
    long = 100 if small else 1024
    for width in (2, 6, 16, 24, 32, 64, 100, 128, 256):
        if small and width > 64:
            continue
        yield trial(2, 77, width, width)
        yield trial(2, 330, width, width, packed=True)
        for dtype in (torch.float32, *HALVES):
            yield trial(2, long, width, width, heads=(2, 4), packed=width % 3 == 2, dtype=dtype)
    # Known to exceed tolerances in float32: strong decay without process noise (variances below 1e-38); key noise 1e-5.
    edges: list[dict[str, float]] = [{"log_decay": 0.0}, {"log_decay": -30.0}, {"process_noise": 0.0}]
    edges += [{"key_noise": 1e-5}, {"query_noise": 0.0}, {"frequency": 0.0}]
    edges += [{"log_decay": 0.0, "process_noise": 0.0, "query_noise": 0.0}]
    for edge in edges:
        yield trial(2, long, 64, 64, overrides=edge)
        yield trial(2, long, 48, 48, overrides=edge, packed=True)
    if not small:
        yield trial(1, 16_384, 128, 128)
        yield trial(4, 4096, 128, 128, heads=(16, 16), dtype=torch.bfloat16)


def trials(op: str, small: bool) -> list[Trial]:
    """Return the trials of every problem of an op."""
    problems = [name for name, problem in PROBLEMS.items() if problem.design.op == op]
    trials_of = {"diagonal": lambda _, small: diagonal_trials(small), "attend": attend_trials}.get(op, memory_trials)
    return [trial for name in problems for trial in trials_of(name, small)]


def measure(trial: Trial, kernel: str, device: str) -> list[Measurement]:
    case = trial.case(kernel, device)
    exactly = case.with_changes(kernel="chunked", dtype=torch.float64)
    inputs, segments = trial.inputs(case)
    exact = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    specify = lambda x: outputs(exactly.run(x, segments))  # noqa: E731
    actual = outputs(case.run(inputs, segments))
    dtypes = [case.dtype] + [case.state_dtype] * (len(actual) - 1)
    expected = specify(exact)
    allowed = budgets(specify, exact, expected, case.state_dtype, dtypes, case.product_dtype)
    measurements = compare(case.quantities, actual, expected, allowed)
    weights = [torch.randn(y.shape, device=device).to(y.dtype) for y in actual]
    pull = partial(vjp, partial(exactly.run, segments=segments), weights)
    dtypes = [x.dtype for x in differentiable(inputs).values()]
    d_expected = pull(exact)
    allowed = budgets(pull, exact, d_expected, case.state_dtype, dtypes, case.product_dtype)
    d_got = vjp(partial(case.run, segments=segments), weights, inputs)
    return measurements + compare([f"d {name}" for name in differentiable(inputs)], d_got, d_expected, allowed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=OPS, default="diagonal")
    parser.add_argument("--kernel", default="triton" if torch.cuda.is_available() else "chunked")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--start", type=int, default=0, metavar="N", help="begin with trial N")
    arguments = parser.parse_args()
    count = off = 0
    worst = Measurement("nothing", 0.0, 1.0)
    for number, trial in enumerate(trials(arguments.op, small=arguments.device == "cpu")):
        if number < arguments.start or trial.case(arguments.kernel, arguments.device).unsupported_reason is not None:
            continue
        measurements = measure(trial, arguments.kernel, arguments.device)
        most = max(measurements, key=lambda m: m.error / m.budget)
        worst = max(worst, most, key=lambda m: m.error / m.budget)
        count += 1
        off += not most.ok
        print(
            f"{'ok ' if most.ok else 'OFF'} {number:>3} {most.quantity:<18} "
            f"{most.error:.1e} of {most.budget:.1e}  {trial}",
            flush=True,
        )
    print(f"{count} calls tried, {off} off; closest to its budget: {worst}")
    sys.exit(off > 0)


if __name__ == "__main__":
    main()
