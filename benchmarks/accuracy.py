"""Compare every launch configuration of every kernel with float64, at real sizes and at the edges of what is legal.

    python benchmarks/accuracy.py                 # this machine: a GPU if there is one, else the CPU (small sizes)
    python benchmarks/accuracy.py --start 62      # from trial 62 on: each is numbered from 0 where it is printed

Forward and all gradients, norm-wise, each against its computed budget (`kalmix.testing.budgets`). The exact answer is
the chunked kernel's in float64, which the laws hold to the oracle. Exit status 1 if anything is off.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch

from kalmix import Segments
from kalmix.kernels.kernel import Call
from kalmix.ops import OPS
from kalmix.testing.budgets import Tensors, budgets
from kalmix.testing.cases import Case, outputs
from kalmix.testing.measure import Measured, compare, pull_back

SLOTS = (1, 3, 8, 16, 24, 32, 64, 100, 128)


@dataclass(frozen=True)
class Trial:
    """One call: sizes, and what its signals are set to (absent: random)."""

    batch: int
    length: int
    channels: int
    slots: int
    heads: tuple[int, int] = (1, 1)
    packed: bool = False
    dtype: torch.dtype = torch.float32
    precision: float | None = None
    log_decay: float | None = None
    process_noise: float | None = None

    def case(self, op: str, kernel: str, device: str) -> Case:
        key_heads, value_heads = self.heads
        sizes = {"batch": self.batch, "length": self.length, "key_width": self.slots, "value_width": self.channels}
        return Case(op, kernel, device, self.dtype, key_heads=key_heads, value_heads=value_heads, **sizes)

    def inputs(self, case: Case) -> tuple[Tensors, Segments | None]:
        segments = case.packing() if self.packed else None
        inputs = case.inputs(sequences=segments and segments.count)
        for name in ("precision", "log_decay", "process_noise"):
            if getattr(self, name) is not None:
                inputs[name] = torch.full_like(inputs[name], getattr(self, name))
        return inputs, segments


def trials(small: bool) -> Iterator[Trial]:
    long, wide = (200, 33) if small else (2048, 1361)
    for slots in SLOTS:
        yield Trial(2, 77, 37, slots)
        yield Trial(2, 330, 37, slots, packed=True)
        yield Trial(2, long, wide, slots)
        yield Trial(2, long, 130, slots, heads=(2, 4), packed=True)
    for dtype in (torch.bfloat16, torch.float16):
        for slots in (8, 32, 128):
            yield Trial(2, long, 129, slots, dtype=dtype, packed=slots == 32)
    edges = [(None, None, 0.0), (None, None, 1e3), (0.0, None, None), (1e4, None, None), (None, -30.0, None)]
    edges += [(None, 0.0, None), (None, 0.0, 0.0), (1e4, 0.0, 0.0), (1e4, 0.0, 1e3), (1e4, -30.0, 1e-6)]
    for precision, log_decay, noise in edges:
        for packed in (False, True):
            extremes = {"precision": precision, "log_decay": log_decay, "process_noise": noise}
            yield Trial(2, long, 96, 16, packed=packed, **extremes)
    if not small:
        for slots in (16, 32):
            yield Trial(1, 65_536, 96, slots)
            yield Trial(1, 65_536, 96, slots, log_decay=0.0, process_noise=0.0)
            yield Trial(4, 4096, 496, slots)
        yield Trial(64, 512, 512, 32)


def measure(trial: Trial, op: str, kernel: str, device: str) -> list[Measured]:
    case = trial.case(op, kernel, device)
    exactly = case.having(kernel="chunked", dtype=torch.float64)
    inputs, segments = trial.inputs(case)
    exact = {name: x.double() for name, x in inputs.items()}
    specify = lambda x: outputs(exactly.run(x, segments))  # noqa: E731
    got = outputs(case.run(inputs, segments))
    found = compare(case.quantities, got, specify(exact), budgets(specify, exact, case.carried, [y.dtype for y in got]))
    weights = [torch.randn(y.shape, device=device).to(y.dtype) for y in got]
    pull = partial(pull_back, partial(exactly.run, segments=segments), weights)
    allowed = budgets(pull, exact, case.carried, [x.dtype for x in inputs.values()])
    d_got = pull_back(partial(case.run, segments=segments), weights, inputs)
    return found + compare([f"d {name}" for name in inputs], d_got, pull(exact), allowed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=OPS, default="diagonal")
    parser.add_argument("--kernel", default="triton" if torch.cuda.is_available() else "chunked")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--start", type=int, default=0, help="number of the first trial")
    arguments = parser.parse_args()
    kernel = next(kernel for kernel in OPS[arguments.op].kernels if kernel.name == arguments.kernel)
    tried = off = 0
    worst = Measured("nothing", 0.0, 1.0)
    every = enumerate(trials(small=arguments.device == "cpu"))
    for number, trial in islice(every, arguments.start, None):
        if kernel.refuses(Call(arguments.device, trial.dtype, trial.slots, trial.channels)) is not None:
            continue
        found = measure(trial, arguments.op, arguments.kernel, arguments.device)
        most = max(found, key=lambda m: m.error / m.budget)
        worst = max(worst, most, key=lambda m: m.error / m.budget)
        tried += 1
        off += not most.ok
        print(
            f"{number:>2} {'ok ' if most.ok else 'OFF'} {most.quantity:<18} {most.error:.1e} of {most.budget:.1e}",
            trial,
            flush=True,
        )
    print(f"{tried} calls tried, {off} off; closest to its budget: {worst}")
    sys.exit(off > 0)


if __name__ == "__main__":
    main()
