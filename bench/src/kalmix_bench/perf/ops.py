"""Time every kernel of an op, and other libraries if installed, and compare all with float64.

    python -m kalmix_bench.perf.ops                      # a GPU if there is one, otherwise the CPU
    python -m kalmix_bench.perf.ops --op delta --dtype bfloat16 --decay key
    python -m kalmix_bench.perf.ops --curves             # time and memory against length (Figures 4 and 9 of KLA)

Prints a table, on a GPU row by row, and writes bench/results/<date>-<hardware>-<op>[-keys|-pairs][-curves].json (or to
--output) after every shape. `python -m kalmix_bench.perf.draw FILE` draws the curves.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import shlex
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kalmix
from kalmix.ops import OPS, Chebyshev, ConjugateGradient
from kalmix.ops._shared.kernel import KernelRequest
from kalmix.training.provenance import provenance
from kalmix_bench.perf.peers import PEERS
from kalmix_bench.perf.result_file import dated_file
from kalmix_bench.perf.timing import Timing, measure
from kalmix_bench.perf.workloads import COLUMNS, CURVES, SHAPES, WITH_VARIANCE, Shape, Signals, signals

CONVERGED = {"ridge": {"solver": Chebyshev(100)}}  # options with which an op is exact
PEER_DTYPE = {"diagonal": torch.float32}  # dtype of other libraries; bfloat16 by default
# Largest head dimension of some other libraries.
PEER_WIDTH = {"gka (authors)": 128, "fla gka": 128, "fla mesa_net": 128}
# Largest lengths of kernels that are slow or need much memory.
LONGEST = {
    "cuda": {
        "reference": 1024,
        "reference diagonal": 2048,  # as in section 5.2 of Kalman Linear Attention
        "kla (recurrence) diagonal": 2048,
        "kla (PyTorch) diagonal": 4096,
        "chunked dense": 4096,
        "reference attend": 16384,  # stores all pairs at once
    },
    "cpu": {"reference": 4096},
}
DECAYS = "a decay per head, per key dimension, or of dense per pair of key dimensions, with a rotation"


def candidates(op: str, x: Signals, compiled: bool) -> dict[str, Callable[[Signals], tuple[Tensor, ...]]]:
    """Return our kernels that support the call, and the other libraries that are installed."""
    device, dtype = x["q"].device.type, x["q"].dtype
    request = KernelRequest(device, dtype, x["q"].shape[-1], x["v"].shape[-1], x["v"].shape[1])
    runs: dict[str, Callable[[Signals], tuple[Tensor, ...]]] = {}
    for kernel in OPS[op].kernels:
        if kernel.needs_interpreter(request) or kernel.unsupported_reason(request) is not None:
            continue
        if x["q"].shape[1] > _longest(op, kernel.name, device):
            continue
        run = partial(_ours, op, kernel.name)
        runs[kernel.name] = run
        if op == "dense":  # as layers use it in training
            runs[f"{kernel.name}, mean alone"] = partial(run, variance=False)
        if op == "ridge":  # about enough in half precision: see docs/results/solvers.md
            runs[f"{kernel.name}, 24 iterations"] = partial(run, solver=Chebyshev(24))
            runs[f"{kernel.name}, 14 CG"] = partial(run, solver=ConjugateGradient(14))
        if compiled and kernel.name == "chunked":
            runs["chunked, compiled"] = torch.compile(run, fullgraph=True)
    if device != "cuda" or dtype != PEER_DTYPE.get(op, torch.bfloat16):
        return runs
    width, length = x["v"].shape[-1], x["q"].shape[1]
    peers = {name: run for name, run in PEERS[op]().items() if width <= PEER_WIDTH.get(name, width)}
    return runs | {name: run for name, run in peers.items() if length <= _longest(op, name, device)}


def _longest(op: str, name: str, device: str) -> float:
    """Return the largest length of a kernel or a library."""
    return LONGEST[device].get(f"{name} {op}", LONGEST[device].get(name, math.inf))


def _ours(op: str, kernel: str | None, x: Signals, **options: Any) -> tuple[Tensor, ...]:
    if op not in WITH_VARIANCE:
        return (OPS[op].function(**x, **options, kernel=kernel).mean,)
    result = OPS[op].function(**x, **{"variance": True} | options, kernel=kernel)
    return (result.mean,) if result.variance is None else (result.mean, result.variance)


def backward(run: Callable[[Signals], tuple[Tensor, ...]], x: Signals, upstream: list[Tensor]) -> tuple[Tensor, ...]:
    results = run(x)  # other libraries may return fewer outputs
    weights = [w.view_as(y) for w, y in zip(upstream, results, strict=False)]
    return torch.autograd.grad(results, list(x.values()), weights, allow_unused=True)


class Reference:
    """Outputs and gradients for the same inputs in a wider dtype.

    Args:
        op: op.
        x: inputs.
        dtype: float64 for the chunked kernel; otherwise the kernel that the op chooses.
        options: other arguments of the op.
    """

    def __init__(self, op: str, x: Signals, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        kernel = "chunked" if dtype == torch.float64 else None
        self.exactly = partial(_ours, op, kernel, **CONVERGED.get(op, {}) | options)
        self.exact = {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in x.items()}
        with torch.no_grad():
            self.want = self.exactly(self.exact)
        self.upstream = [torch.randn_like(y) for y in self.want]
        self._gradients: dict[int, tuple[Tensor, ...]] = {}  # by number of outputs

    def gradients(self, outputs: int) -> dict[str, Tensor]:
        """Return the gradients of the first `outputs` outputs, which are computed once."""
        if outputs not in self._gradients:
            self._gradients[outputs] = backward(lambda y: self.exactly(y)[:outputs], self.exact, self.upstream)
        return dict(zip(self.exact, self._gradients[outputs], strict=True))

    def errors(self, run: Callable[[Signals], tuple[Tensor, ...]], x: Signals) -> tuple[float | None, dict[str, float]]:
        """Return the largest error of the outputs and the error of each gradient, in norm; nothing if a gradient is
        missing.
        """
        outputs = [y.detach() for y in run(x)]
        weights = [w.to(y.dtype) for w, y in zip(self.upstream, outputs, strict=False)]
        gradients = dict(zip(x, backward(run, x, weights), strict=True))
        if any(gradient is None for gradient in gradients.values()):
            return None, {}
        forward = max(_error(y.view_as(w), w) for y, w in zip(outputs, self.want, strict=False))
        references = self.gradients(len(outputs))
        return forward, {name: _error(gradients[name], references[name]) for name in x}


def _error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach().double() - expected.detach()).norm() / expected.detach().norm())


def bench(
    op: str, decay: str, shape: Shape, device: str, dtype: torch.dtype, errors: bool, compiled: bool, only: str
) -> list[dict]:
    """Return rows of results for one shape, and print each: forward, and forward with backward."""
    x = signals(op, decay, shape, device, dtype)
    runs = {name: run for name, run in candidates(op, x, compiled).items() if re.search(only, name)}
    upstream = [torch.ones_like(x["v"].detach())]  # for the mean and the variance
    if op in WITH_VARIANCE:
        width = x["v"].shape[3] if op == "diagonal" else 1
        upstream.append(torch.ones(*x["v"].shape[:3], width, device=device))
    in_use = sum(leaf.numel() * leaf.element_size() for leaf in [*x.values(), *upstream])  # memory in use during a call
    rows: list[dict] = []
    truth = None
    # On a CPU candidates alternate, so all are measured before any is printed.
    for names in [[name] for name in runs] if device == "cuda" else [list(runs)]:
        # Backward first, so that it includes the first call.
        backs = measure({name: partial(backward, runs[name], x, upstream) for name in names}, device)
        with torch.no_grad():
            aheads = measure({name: partial(runs[name], x) for name in backs}, device)
        truth = truth or (Reference(op, x) if errors else None)
        for name, back in backs.items():
            row = _row(name, shape, dtype, aheads[name], back) | {
                # Relative to the minimum memory: inputs, outputs, and the gradients of both.
                "peak_ratio": (back.peak + in_use) / (2 * in_use),
            }
            row["error"], row["gradient_errors"] = truth.errors(runs[name], x) if truth else (None, {})
            _show(row)
            rows.append(row)
    return rows


def _row(name: str, shape: Shape, dtype: torch.dtype, ahead: Timing, back: Timing) -> dict:
    return {
        "kernel": name, "shape": shape, "dtype": str(dtype).removeprefix("torch."),
        "forward_ms": ahead.ms, "both_ms": back.ms, "forward_peak": ahead.peak, "both_peak": back.peak,
        "first_call_s": ahead.first + back.first,
    }  # fmt: skip


def _show(row: dict) -> None:
    worst = max(row["gradient_errors"].values(), default=float("nan"))
    error = float("nan") if row["error"] is None else row["error"]
    print(
        f"{row['shape']!s:>24} {row['dtype']:>8} {row['kernel']:<20} {row['forward_ms']:9.3f} {row['both_ms']:9.3f} "
        f"{row['both_peak'] / 2**20:8.1f} {row['peak_ratio']:6.2f} {row['first_call_s']:6.1f} "
        f"{error:7.1e} {worst:7.1e}",
        flush=True,
    )


HEADER = (
    f"{'dtype':>8} {'kernel':<20} {'fwd ms':>9} {'f+b ms':>9} {'peak MiB':>8} {'ratio':>6} {'1st s':>6} "
    f"{'error':>7} {'d error':>7}"
)


def hardware(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpu = Path("/proc/cpuinfo")
    model_name = re.search(r"model name\s*: (.*)", cpu.read_text()) if cpu.exists() else None
    return f"{model_name[1] if model_name else platform.processor() or 'cpu'}, {torch.get_num_threads()} threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=OPS, default="diagonal")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--decay", choices=["head", "key", "pair"], default="head", help=DECAYS)
    parser.add_argument("--shape", action="append", metavar="B,T,...", help="sizes as in the first column; repeatable")
    parser.add_argument("--only", default="", metavar="REGEX", help="kernels and libraries whose name matches")
    parser.add_argument("--curves", action="store_true", help="measure time and memory against length")
    parser.add_argument("--compile", action="store_true", help="also time the chunked kernel under torch.compile")
    parser.add_argument("--output", type=Path, default=Path("results"))
    arguments = parser.parse_args()
    device = arguments.device
    if arguments.decay == "pair" and arguments.op != "dense":
        parser.error("--decay pair needs --op dense")

    print(f"{hardware(device)}; torch {torch.__version__}; kalmix {kalmix.__version__}")
    print(f"{COLUMNS[arguments.op]:>24} {HEADER}", flush=True)
    dtypes = [getattr(torch, name) for name in arguments.dtype or ["float32"]]
    if arguments.curves:
        batch, longest, *sizes = CURVES[arguments.op][device]
        shapes = [(batch, 2**n, *sizes) for n in range(8, longest.bit_length())]
        dtypes = dtypes[:1]
    else:
        given = [tuple(map(int, shape.split(","))) for shape in arguments.shape or ()]
        shapes = given or SHAPES[arguments.op][device]
    file = dated_file(arguments.output, hardware(device), _measured(arguments))
    about = {"hardware": hardware(device), "torch": torch.__version__, "kalmix": kalmix.__version__}
    about["commit"] = provenance(torch.device(device))["commit"]
    about["command"] = shlex.join(["python", "-m", "kalmix_bench.perf.ops", *sys.argv[1:]])
    rows: list[dict] = []
    for dtype, shape in product(dtypes, shapes):
        compiled = arguments.compile and (arguments.curves or shape == shapes[0])
        rows += bench(
            arguments.op, arguments.decay, shape, device, dtype, not arguments.curves, compiled, arguments.only
        )
        arguments.output.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    print(f"wrote {file}")


def _measured(arguments: argparse.Namespace) -> str:
    keys = f"-{arguments.decay}s" if arguments.decay != "head" and arguments.op != "diagonal" else ""
    return f"{arguments.op}{keys}{'-curves' if arguments.curves else ''}"


if __name__ == "__main__":
    main()
