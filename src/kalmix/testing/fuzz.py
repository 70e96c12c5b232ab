"""Compare random calls of every op and kernel with independent float64 recursions, gradients included.

    python -m kalmix.testing.fuzz --cases 10000 --seed 0 --jobs 32

Each call has a number. `--case NUMBER` runs it alone and prints every quantity. The tolerance of a quantity is its
budget (`kalmix.testing.tolerances`): how far the recursion moves when it is computed in lower precision. It needs
torch, numpy and Triton, which is interpreted where there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix import ops
from kalmix.errors import KernelError
from kalmix.ops._shared.environment import HAS_TRITON
from kalmix.segments import Segments
from kalmix.testing.cases import PROBLEMS, Case
from kalmix.testing.draws import SIGNAL_DRAWS, TILE_KERNELS, Draw, draw, fuzzed_ops
from kalmix.testing.measure import forward_and_gradients
from kalmix.testing.pairs import DYNAMICS, QUERY_SHARE, ROUNDED, attend_pairs
from kalmix.testing.recursions import FIELDS, SQUARES, filter_tokens, stack_inputs, symmetric
from kalmix.testing.tolerances import DATA, DRAWS, ROUNDINGS, Tensors, budgets, relative_error

# Triton stores H, x and its adjoint in bfloat16; k'x may be far smaller than x.
HALF_INTERMEDIATES = {"rounding.decays", "rounding.grams", "rounding.solutions"}
TILE = 64  # largest number of tokens that a kernel sums at once
MOST_STACKED = 2**22  # numbers of the states of all tokens that `exact_many` filters at once
PER_SEED = 10**9  # call numbers per seed
SMALLEST = {torch.float64: 1e-290, torch.float32: 1e-30, torch.bfloat16: 1e-30, torch.float16: 2.0**-24}


class Quantity(NamedTuple):
    """Relative error and budget of an output or a gradient."""

    name: str
    error: float
    budget: float

    @property
    def share(self) -> float:
        """Error over budget."""
        return self.error / self.budget if self.error else 0.0


class Outcome(NamedTuple):
    """Result of one call; `error_text` is a traceback if it raised."""

    case: Draw
    quantities: list[Quantity]
    error_text: str
    seconds: float

    @property
    def failures(self) -> list[Quantity]:
        return [x for x in self.quantities if not x.error <= x.budget]

    @property
    def failed(self) -> bool:
        return bool(self.error_text or self.failures)


def kernels_on(device: str) -> Any:
    """Return a function from an op to its kernels; names repeat as weights, since the interpreter is slow."""

    def named(op: str) -> list[str]:
        names = ["chunked", "reference"]
        names = ["triton"] * 4 + names + ["cuda"] * 4 if device == "cuda" else names * 12 + ["triton"]
        known = {kernel.name for kernel in ops.OPS[op].kernels}
        return [name for name in names if name in known]

    return named


def run_case(number: int, device: str = "cpu", only: tuple[str, ...] | None = None) -> Outcome:
    """Run call `number` and measure every output and gradient."""
    start_time = time.monotonic()
    case = draw(number, kernels_on(device), only, small=device == "cpu")
    try:
        quantities, error_text = measure(case, device), ""
    except Exception:
        quantities, error_text = [], traceback.format_exc()
    return Outcome(case, quantities, error_text, time.monotonic() - start_time)


def interpretable() -> bool:
    """Whether Triton's interpreter works here; it needs numpy below 2.4."""
    version = importlib.metadata.version("numpy").split(".")[:2]
    return HAS_TRITON and tuple(map(int, version)) < (2, 4)


def measure(case: Draw, device: str) -> list[Quantity]:
    if case.op not in SIGNAL_DRAWS:
        return measure_problem(case, device)
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in case.x.items()}
    if case.kernel == "triton" and device == "cpu" and not interpretable():
        case.kernel = "chunked"
    inputs_and_ones, weights = inputs | ones_of(case), []
    expected = exact(case, weights, inputs_and_ones)
    if torch.float16 in {x.dtype for x in case.x.values()}:
        expected = fit_half(case, weights, inputs_and_ones)
    try:
        got = answers(case, partial(call, case, device), case.x, weights, device)
    except KernelError:  # the kernel does not support this call; "reference" supports all
        case.kernel = "triton" if case.kernel == "cuda" else "reference"
        got = answers(case, partial(call, case, device), case.x, weights, device)
    returned = [x.dtype if x.is_floating_point() else torch.float64 for x in got]
    allowed = tolerances(case, weights, inputs_and_ones, expected, returned)
    found = []
    for name, g, w, kind, budget in zip(names_of(case), got, expected, returned, allowed, strict=True):
        if g.shape != w.shape:
            raise AssertionError(f"{name} is {list(g.shape)}, expected {list(w.shape)}")
        if kind == torch.float16 and w.numel() and float(w.abs().max()) > torch.finfo(kind).max:
            continue  # float16 cannot hold it
        vanishing = SMALLEST[kind] * w.numel() ** 0.5 / max(float(w.double().norm()), torch.finfo(torch.float64).tiny)
        found.append(Quantity(name, relative_error(g.cpu(), w), budget + vanishing))
    return found


def measure_problem(case: Draw, device: str) -> list[Quantity]:
    """Compare an op that has no draws and no independent recursion with the oracle, on signals of its problems.

    Calls without tokens have no gradients; the laws test them.
    """
    if not any(start < stop for _, start, stop in case.sequences):
        return []
    names = [name for name, problem in PROBLEMS.items() if problem.design.op == case.op]
    letters = ("batch", "B"), ("length", "T"), ("key_heads", "H"), ("value_heads", "G"), ("key_width", "K")
    sizes = {name: case.sizes[letter] for name, letter in (*letters, ("value_width", "V"))}
    trial = Case(names[case.number % len(names)], case.kernel, device, case.dtype, **sizes, seed=case.number)
    if trial.unsupported_reason is not None:
        case.kernel = "reference"
        trial = trial.with_changes(kernel="reference")
    segments = None if case.runs is None else trial.segments(case.runs)
    whole = case.dtype in (torch.float32, torch.float64)
    inputs = trial.wide_inputs(case.sizes["N"]) if whole else trial.inputs(case.sizes["N"])
    return [Quantity(*x) for x in forward_and_gradients(trial, inputs, segments, 3 * DRAWS)]


def tolerances(
    case: Draw, weights: list[Tensor], x: Tensors, expected: list[Tensor], returned: list[torch.dtype]
) -> list[float]:
    """Return budgets: the change of the recursion when its inputs are rounded and it is computed in float32.

    For the pairs of `attend`, stored intermediate results are rounded too. A float64 kernel may round as often as a
    float32 one. Products in half precision round inputs and `HALF_INTERMEDIATES`. `ROUNDINGS` holds for sums of up to
    16 terms; sums of n terms, in any order, are sqrt(n / 16) times less accurate.
    """
    terms = max(16, case.sizes["K"], min(case.sizes["T"], TILE))
    single, double = (torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64))

    def recompute(trials: list[Tensors]) -> list[list[Tensor]]:
        single_inputs = [{name: y if name in DATA else y.float() for name, y in inputs.items()} for inputs in trials]
        return exact_many(case, weights, single_inputs)

    run = partial(exact, case, weights)
    epsilons = [torch.finfo(dtype).eps for dtype in returned]
    few = case.op != "attend" and case.sizes["T"] > TILE  # long recursions are slow and have many tokens to round
    draws = DRAWS if few else 3 * DRAWS
    computed = budgets(run, x, expected, torch.float32, returned, draws=draws, exact_many=recompute)
    allowed = [e + (budget - e) * (terms / 16) ** 0.5 for e, budget in zip(epsilons, computed, strict=True)]
    if case.op == "dense":  # rounding a covariance p changes gains by eps p / r^2
        statistics: dict[str, Any] = {"certainty": 0.0}
        filter_tokens("dense", x, statistics, case.sequences)
        allowed = [budget + ROUNDINGS * single * statistics["certainty"] for budget in allowed]
    if case.dtype == torch.float64:
        return [double + (budget - double) * double / single for budget in allowed]
    if case.kernel in TILE_KERNELS and case.dtype != torch.float32:
        inputs = {n: y for n, y in x.items() if not n.startswith("rounding.") or n in HALF_INTERMEDIATES}
        straight = [torch.float64] * len(returned)
        run_many = partial(exact_many, case, weights)
        halves = budgets(run, inputs, run(inputs), torch.float64, straight, case.dtype, 3 * DRAWS, run_many)
        allowed = [a + b for a, b in zip(allowed, halves, strict=True)]
    return allowed


def fit_half(case: Draw, weights: list[Tensor], inputs_and_ones: Tensors) -> list[Tensor]:
    """Scale weights, and with them gradients, by a power of 2, so that float16 holds most gradients."""
    gradients = exact(case, weights, inputs_and_ones)[-len(differentiable_names(case.x)) :]
    largest = max((float(x.abs().max()) for x in gradients if x.numel()), default=0.0)
    scale = 2.0 ** -min(12, max(0, math.ceil(math.log2(max(largest, 1.0))) - 10))
    weights[:] = [(w * scale).half().double() for w in weights]
    return exact(case, weights, inputs_and_ones)


def differentiable_names(x: Tensors) -> list[str]:
    return [name for name in x if name not in DATA and not name.startswith("rounding.")]


def names_of(case: Draw) -> list[str]:
    """Return the names of the tensors that `answers` returns."""
    names = ["mean", "variance"] if ops.OPS[case.op].has_variance else ["mean"]
    if case.op == "attend":
        names += ["keys", "values", "times", "positions"] if case.options["causal"] else []
    else:
        names += FIELDS[case.op]
    return [*names, *(f"d {name}" for name in differentiable_names(case.x))]


def answers(case: Draw, run: Any, x: Tensors, weights: list[Tensor], device: str = "cpu") -> list[Tensor]:
    """Return outputs and the gradients of their weighted sum; draw the weights if the list is empty."""
    leaves = {name: x[name].detach().to(device).clone().requires_grad_() for name in differentiable_names(x)}
    found = run(x | leaves)
    if not weights:
        generator = torch.Generator().manual_seed(case.number)
        weights += [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in found]
        weights[:] = [w.to(case.dtype).double() for w in weights]
    differentiable_pairs = [(y, w) for y, w in zip(found, weights, strict=True) if y.requires_grad and y.numel()]
    if not differentiable_pairs:
        return [*(y.detach() for y in found), *(torch.zeros_like(leaf) for leaf in leaves.values())]
    directions = [w.to(y) for y, w in differentiable_pairs]
    outputs = [y for y, _ in differentiable_pairs]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), directions, allow_unused=True)
    pairs = zip(gradients, leaves.values(), strict=True)
    return [*(y.detach() for y in found), *(torch.zeros_like(leaf) if g is None else g for g, leaf in pairs)]


def exact(case: Draw, weights: list[Tensor], x: Tensors) -> list[Tensor]:
    """Return outputs and gradients of the independent recursion, in the dtype of its inputs."""
    formula = attend_pairs if case.op == "attend" else partial(filter_tokens, case.op)
    return answers(case, lambda inputs: formula(inputs, case.options, case.sequences), x, weights)


def exact_many(case: Draw, weights: list[Tensor], trials: list[Tensors]) -> list[list[Tensor]]:
    """Return `exact` of each input. The recursion filters the sequences of all inputs at once if they are small."""
    count, s = len(trials), case.sizes
    numbers = count * s["T"] * s["N"] * s["G"] * s["K"] * max(s["K"], s["V"])
    shared = case.op == "diagonal" and case.x["log_decay"].ndim == 3  # the same dynamics for all sequences
    if case.op == "attend" or shared or numbers > MOST_STACKED:
        return [exact(case, weights, x) for x in trials]
    x, runs = stack_inputs(trials, case.sequences)
    repeated = [torch.cat([w] * count) for w in weights]
    found = answers(case, lambda inputs: filter_tokens(case.op, inputs, case.options, runs), x, repeated)
    return [list(parts) for parts in zip(*(y.unflatten(0, (count, y.shape[0] // count)) for y in found), strict=True)]


def ones_of(case: Draw) -> Tensors:
    """Return ones that `recursions` multiplies to intermediate results, whose rounding is then part of the budget."""
    b, t, h, g, k, v, n = (case.sizes[x] for x in "BTHGKVN")
    if case.op == "attend":
        slots = case.x["prior.positions"].shape[1] if "prior.positions" in case.x else 0
        found = {f"rounding.{name}": torch.ones(b, t, slots + t, h, dtype=torch.float64) for name in ROUNDED}
        if case.kernel == "triton":  # see docs/ops/attend.md: a sum over tokens
            found["rounding.query_turns"] = torch.ones(b, t, h, k, dtype=torch.float64)
            found["rounding.value_turns"] = torch.ones(b, t, g, v, dtype=torch.float64)
            found[f"rounding.{QUERY_SHARE}"] = torch.ones(b, t, slots + t, h, dtype=torch.float64)
        return found
    found = {"rounding.turns": torch.ones(t, n, g, k // 2, dtype=torch.float64)} if "angle" in case.x else {}
    if case.kernel in TILE_KERNELS and case.op != "diagonal":
        found["rounding.decays"] = torch.ones(t, n, g, k, dtype=torch.float64)
    if (case.kernel, case.op, case.dtype) == ("triton", "ridge", torch.bfloat16):  # float16 is computed in float32
        found["rounding.grams"] = torch.ones(t, n, g, k, k, dtype=torch.float64)
        found["rounding.solutions"] = torch.ones(t, n, g, 2 * k, dtype=torch.float64)
    return found


def call(case: Draw, device: str, x: Tensors) -> list[Tensor]:
    """Return the kernel's mean, variance if there is one, and belief."""
    x = {name: part.to(device) for name, part in x.items()}
    signals: dict[str, Any] = {name: part for name, part in x.items() if "." not in name} | case.options
    kind = ops.OPS[case.op].belief
    if any(name.startswith("prior.") for name in x):
        parts = [x[f"prior.{field}"] for field in kind._fields]  # type: ignore[attr-defined]
        pairs = zip(kind._fields, parts, strict=True)  # type: ignore[attr-defined]
        signals["belief"] = kind(*(symmetric(part) if field in SQUARES else part for field, part in pairs))
    if "value_dynamics.log_decay" in x:
        signals["value_dynamics"] = ops.Dynamics(*(x[f"value_dynamics.{name}"] for name in DYNAMICS))
    if ops.OPS[case.op].has_variance:
        signals["variance"] = True
    if case.runs is not None:
        rows = torch.tensor(case.runs, dtype=torch.int32, device=device).reshape(-1, 3)
        signals["segments"] = Segments.of(rows)
    found = getattr(ops, case.op)(**signals, kernel=case.kernel)
    read = [found.mean] if found.variance is None else [found.mean, found.variance]
    if case.op == "attend":
        return [*read, *found.belief.compact()] if found.belief is not None else read
    return [*read, *found.belief]


def outcomes(numbers: list[int], options: argparse.Namespace) -> Iterator[Outcome]:
    """Run calls in `jobs` processes, or in this one; start none after `seconds`."""
    start_time, only = time.monotonic(), tuple(options.ops)

    def out_of_time() -> bool:
        return options.seconds is not None and time.monotonic() - start_time > options.seconds

    if options.jobs == 1:
        for number in numbers:
            if out_of_time():
                return
            yield run_case(number, options.device, only)
        return
    context, waiting = multiprocessing.get_context("spawn"), iter(numbers)
    pending: set[Future[Outcome]] = set()
    with ProcessPoolExecutor(options.jobs, context, prepare, (options.device,)) as pool:
        while True:
            while len(pending) < 3 * options.jobs and not out_of_time():
                number = next(waiting, None)
                if number is None:
                    break
                pending.add(pool.submit(run_case, number, options.device, only))
            if not pending:
                return
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


def prepare(device: str) -> None:
    """Use one thread a process, and Triton's interpreter on a CPU; before Triton is imported."""
    torch.set_num_threads(1)
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"


class Summary:
    """Counts of calls and failures, and the largest error over budget per op."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.failed: Counter[tuple[str, str]] = Counter()
        self.worst: defaultdict[tuple[str, str], tuple[float, str]] = defaultdict(lambda: (0.0, ""))
        self.quantities: int = 0
        self.empty: int = 0  # budgets of 1 and more are no test

    def add(self, outcome: Outcome) -> None:
        key = outcome.case.op, outcome.case.kernel
        self.calls[key] += 1
        self.failed[key] += outcome.failed
        for x in outcome.quantities:
            description = f"{x.name} of case {outcome.case.number}: error {x.error:.1e}, budget {x.budget:.1e}"
            self.worst[key] = max(self.worst[key], (x.share, description))
            self.quantities += 1
            self.empty += x.budget >= 1 and x.error > 0

    def lines(self) -> Iterator[str]:
        for key in sorted(self.calls):
            share, description = self.worst[key]
            counts = f"{self.calls[key]:6} cases {self.failed[key]:5} failures"
            yield f"{' '.join(key):20} {counts}  worst {share:.2f} ({description})"
        yield f"{self.calls.total()} cases, {self.failed.total()} failures"
        yield f"{self.empty} of {self.quantities} budgets are 1 or more"


def report(outcome: Outcome, every: bool = False) -> Iterator[str]:
    """Describe a failure, or every quantity of a call."""
    if outcome.failed or every:
        yield f"case {outcome.case.number}: {outcome.case} ({outcome.seconds:.1f} s)"
    for x in outcome.quantities if every else outcome.failures:
        yield f"    {x.name}: error {x.error:.2e}, budget {x.budget:.2e}{'' if x.error <= x.budget else '  FAILED'}"
    if outcome.error_text:
        yield "    " + outcome.error_text.strip().replace("\n", "\n    ")


def fuzz(options: argparse.Namespace) -> int:
    """Run calls, print failures and a summary; returns the number of failures."""
    first = options.seed * PER_SEED
    numbers = list(range(first, first + options.cases)) if options.case is None else [options.case]
    options.jobs = 1 if options.case is not None else options.jobs
    summary = Summary()
    for outcome in outcomes(numbers, options):
        summary.add(outcome)
        for line in report(outcome, every=options.case is not None):
            print(line, flush=True)
    for line in summary.lines():
        print(line, flush=True)
    return summary.failed.total()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kalmix.testing.fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=int, default=1000, help="calls to run")
    parser.add_argument("--seed", type=int, default=0, help=f"numbers of calls begin at this times {PER_SEED}")
    parser.add_argument("--case", type=int, help="run the call of this number alone and print every quantity")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, help="start no call after this time")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ops", nargs="+", choices=fuzzed_ops(), default=list(fuzzed_ops()))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    chosen: argparse.Namespace = parse()
    prepare(chosen.device)
    sys.exit(1 if fuzz(chosen) else 0)
