"""Run every Triton and CUDA kernel on small calls, forward and backward, under NVIDIA's memory checker.

    python -m kalmix_bench.perf.memcheck --jobs 8

Each share of the problems runs once without the checker, to compile its kernels, because compilers that start under it
can hang. Then `compute-sanitizer --tool memcheck` runs it without PyTorch's memory cache: each tensor is a separate
allocation, so the checker finds accesses past its end. Shares are spread over all GPUs. Exit status 1 if the checker
reports an error, a problem fails, or a kernel was never launched.

Kernels of steps and of `attend_radial` are not among the problems: tests/gpu/memcheck.sh runs their tests under the
checker. `--share 0/8 --note FILE` runs one share without the checker.
"""

from __future__ import annotations

import argparse
import faulthandler
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from triton.runtime.jit import JITFunction

from kalmix import ops
from kalmix.ops import OPS
from kalmix.ops._shared.cuda import CudaKernel
from kalmix.ops._shared.triton import compile_and_launch
from kalmix.testing.cases import PROBLEMS, Case, outputs
from kalmix.testing.measure import differentiable
from kalmix_bench.runner import options

WIDTHS = [(3, 5), (24, 40), (64, 64), (128, 128), (256, 72)]
DTYPES = (torch.float32, torch.bfloat16)
LENGTHS = (19, 150)
HANG_SECONDS = 120  # after so long in one problem, the stacks of all threads are printed


def problems() -> Iterator[Case]:
    """Yield problems of all kernels that need Triton, in several widths, lengths and dtypes."""
    kernels = [(name, row.name) for name in PROBLEMS for row in OPS[PROBLEMS[name].design.op].kernels if row.triton]
    for name, kernel in kernels:
        for key_width, value_width in WIDTHS:
            for dtype in DTYPES:
                for length in LENGTHS:
                    sizes = {"length": length, "key_width": key_width, "value_width": value_width}
                    case = Case(name, kernel, "cuda", dtype, **sizes)
                    if case.op == "diagonal" and key_width > 64:
                        continue
                    if case.unsupported_reason is None:
                        yield case


def title(kernel: JITFunction | CudaKernel) -> str:
    """Return module or file of a kernel, and its name."""
    if isinstance(kernel, CudaKernel):
        return file_title(kernel.source)
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}"


def file_title(source: Path) -> str:
    """Return folder and name of a file with a CUDA kernel, such as _dense/cuda/forward.cu."""
    return "/".join(source.parts[-3:])


def entry_kernels() -> set[str]:
    """Return the kernels that the host launches.

    These are kernels with launch-time integers, and kernels that no other kernel calls or passes on, without those of
    steps and of `attend_radial`.
    """
    kernels = {}
    for module in pkgutil.walk_packages(ops.__path__, "kalmix.ops."):
        if ".triton" in module.name and not re.search(r"\.step$|\.radial_", module.name):
            members = vars(import_module(module.name)).values()
            kernels |= {title(x): x for x in members if isinstance(x, JITFunction)}
    bodies = [inspect.getsource(x.fn).split(f"def {x.fn.__name__}(", 1)[1] for x in kernels.values()]

    def used(kernel: JITFunction) -> bool:
        return any(re.search(rf"\b{kernel.fn.__name__}\b", body) for body in bodies)

    files = {file_title(x) for folder in ops.__path__ for x in Path(folder).glob("*/cuda/*.cu")}
    return files | {name for name, x in kernels.items() if x.do_not_specialize or not used(x)}


def run(case: Case) -> None:
    """Run one packed and one plain call, with gradients of all outputs."""
    for segments in (None, case.packing()):
        inputs = case.inputs(sequences=segments and segments.count)
        leaves = differentiable(inputs)
        inputs |= {name: x.requires_grad_() for name, x in leaves.items()}
        total = torch.stack([y.float().sum() for y in outputs(case.run(inputs, segments))]).sum()
        torch.autograd.grad(total, list(leaves.values()))
    torch.cuda.synchronize()


def check_share(share: str, note: Path, seconds: float, only: str) -> int:
    """Run the problems of one share, and write the names of the launched kernels to `note`."""
    part, parts = map(int, share.split("/"))
    launched, original, begin = set(), compile_and_launch.Launch.run, time.monotonic()

    def run_and_note(step: compile_and_launch.Launch) -> None:
        if not compile_and_launch.is_dry_run():
            launched.add(title(step.kernel))
        original(step)

    compile_and_launch.Launch.run = run_and_note  # type: ignore[method-assign]
    cases = [case for case in problems() if re.search(only, str(case))][part::parts]
    for number, case in enumerate(cases):
        if time.monotonic() - begin > seconds:
            print(f"share {share}: out of time after {number} of {len(cases)} problems", flush=True)
            return 2
        faulthandler.dump_traceback_later(HANG_SECONDS)
        run(case)
        faulthandler.cancel_dump_traceback_later()
        note.write_text("\n".join(sorted(launched)))
        widths = f"{case.key_width}x{case.value_width}, {case.length} tokens"
        print(f"{time.monotonic() - begin:6.1f} s  {case}  {widths}", flush=True)
    print(f"share {share}: {len(cases)} problems ran", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=4, help="processes side by side")
    parser.add_argument("--seconds", type=float, default=1e9, help="a process begins no problem after this time")
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="problems to run, such as ^dense-cuda. Default: all"
    )
    parser.add_argument("--share", help="run one share without the checker: 0/8 is every eighth problem")
    parser.add_argument("--note", type=Path, help="file for the names of launched kernels, with --share")
    arguments = parser.parse_args()
    if arguments.share:
        return check_share(arguments.share, arguments.note, arguments.seconds, arguments.only)
    checker = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", sys.executable, __file__]
    limits = ["--seconds", str(arguments.seconds), "--only", arguments.only]
    gpus = options.gpus("all")
    with TemporaryDirectory() as folder:
        notes = [Path(folder) / f"{i}.txt" for i in range(arguments.jobs)]
        for program in ([sys.executable, __file__], checker):
            shares = [
                subprocess.Popen(
                    [*program, "--share", f"{i}/{arguments.jobs}", "--note", str(note), *limits],
                    env=os.environ
                    | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]},
                )
                for i, note in enumerate(notes)
            ]
            codes = [share.wait() for share in shares]
        launched = {name for note in notes if note.exists() for name in note.read_text().split("\n") if name}
    missing = sorted(entry_kernels() - launched) if not arguments.only else []
    print(f"exit codes {codes}; {len(launched)} kernels launched, never launched: {missing or 'none'}")
    return int(any(codes) or bool(missing))


if __name__ == "__main__":
    sys.exit(main())
