"""Compile the Triton kernels for GPUs that this machine lacks, and check the memory that they need.

    python -m kalmix_bench.perf.gpu_targets                               # shared memory, all ops, four GPUs
    python -m kalmix_bench.perf.gpu_targets --cubin --gpus sm_89 --parts delta   # also registers, by ptxas

Ops and parts of layers run on meta tensors, so the library's own rules choose kernels and options. No kernel runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton._C import libtriton
from triton._C.libtriton import ir, passes
from triton.backends import nvidia
from triton.backends.nvidia.compiler import get_ptx_version_from_options

from kalmix.training.provenance import provenance
from kalmix_bench.perf.gpu_calls import calls
from kalmix_bench.perf.gpu_simulation import GPUS, Collector, Configuration
from kalmix_bench.runner.json_lines import append_rows, read_rows

MAX_TENSOR_MEMORY = 512  # columns


class Resources(NamedTuple):
    """Resources of a compiled kernel.

    Attributes:
        shared: bytes of shared memory per program.
        tensor_memory: columns of tensor memory (Blackwell).
        registers: registers per thread; 0 if not compiled to machine code.
        stack: bytes of local memory per thread, where registers are spilled.
        error: why it does not compile, or "".
    """

    shared: int = 0
    tensor_memory: int = 0
    registers: int = 0
    stack: int = 0
    error: str = ""

    def problem(self, gpu: str) -> str | None:
        """Return why the kernel cannot run on a GPU, or `None` if it can."""
        limit = GPUS[gpu].shared_memory
        if self.error:
            return f"does not compile: {self.error}"
        if self.shared > limit:
            return f"needs {self.shared} bytes of shared memory; a program may use {limit}"
        if self.tensor_memory > MAX_TENSOR_MEMORY:
            return f"needs {self.tensor_memory} columns of tensor memory; there are {MAX_TENSOR_MEMORY}"
        return None


class _AllocatedError(Exception):
    """End of a compilation, once memory is allocated."""


def _allocate_only(*stage_arguments: Any) -> tuple[str, str] | None:
    """Replace the stage that generates LLVM code by its first passes, which allocate memory.

    Args:
        stage_arguments: backend, stages by name, options, language and capability. Triton 3.8 also calls without
            arguments, for a key and a hash of this function.
    """
    if not stage_arguments:
        return "allocate", "allocate"
    backend, stages, options, _language, capability = stage_arguments

    def allocate(module: Any, metadata: dict[str, Any]) -> None:
        manager, version = ir.pass_manager(module.context), get_ptx_version_from_options(options, backend.target.arch)
        passes.ttgpuir.add_combine_tensor_select_and_if(manager)
        passes.ttgpuir.add_allocate_warp_groups(manager)
        passes.convert.add_scf_to_cf(manager)
        passes.gluon.add_inliner(manager)
        libtriton.nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, version)
        libtriton.nvidia.passes.ttnvgpuir.add_allocate_tensor_memory(manager)
        manager.run(module, "allocate")
        raise _AllocatedError(module.get_int_attr("ttg.shared"), module.get_int_attr("ttg.tensor_memory_size") or 0)

    stages["llir"] = allocate
    return None


def allocate(configuration: Configuration) -> Resources:
    """Compile until memory is allocated: a tenth of the time of `assemble`, but LLVM and ptxas do not run."""
    triton.knobs.runtime.add_stages_inspection_hook = _allocate_only
    triton.knobs.compilation.always_compile = True
    try:
        configuration.compile()
    except _AllocatedError as end:
        return Resources(*end.args)
    raise AssertionError("Triton skipped the stage that allocates memory")


def assemble(configuration: Configuration) -> Resources:
    """Compile to machine code."""
    kernel = configuration.compile()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"{name}:(\d+)", report)[-1]) for name in ("REG", "STACK"))
    return Resources(kernel.metadata.shared, kernel.metadata.tmem_size or 0, registers, stack)


def memory_key(configuration: Configuration, ignored: Collection[str] = ()) -> tuple[Any, ...]:
    """Return a key that is equal for configurations to which `allocate` gives equal memory.

    Passes until memory is allocated depend on the generation of the GPU, which is 8 for `sm_80`, `sm_86` and `sm_89`.

    Args:
        configuration: the configuration.
        ignored: constants that do not affect the memory.
    """
    options = sorted((name, x) for name, x in configuration.options.items() if name not in ignored)
    generation = GPUS[configuration.gpu].architecture // 10
    return (generation, configuration.kernel, *options, *configuration.signature)


def compile_all(
    found: dict[str, Configuration],
    compile_one: Callable[[Configuration], Resources],
    store: Path,
    processes: int = 2,
    ignored: Collection[str] = (),
) -> dict[str, Resources]:
    """Compile configurations in other processes, because a failed assertion in Triton ends the process.

    Of configurations with one `memory_key`, `allocate` compiles the first.

    Args:
        found: configurations by key.
        compile_one: `allocate` or `assemble`.
        store: JSON lines of earlier results, which are not computed again; new results are added.
        processes: how many run at a time.
        ignored: constants that do not affect the memory.
    """
    kind = compile_one.__name__
    known = {x["key"]: Resources(*x["resources"]) for x in read_rows(store) if x["kind"] == kind}
    alike = defaultdict[Any, list[str]](list)
    for key, configuration in found.items():
        alike[memory_key(configuration, ignored) if compile_one is allocate else key].append(key)
    equal, waiting = {keys[0]: keys for keys in alike.values()}, list[str]()
    for first, keys in equal.items():
        if done := [known[key] for key in keys if key in known]:
            known.update(dict.fromkeys(keys, done[0]))
        else:
            waiting.append(first)
    workers = [_Compiler(found, compile_one) for _ in range(min(processes, len(waiting)))]
    try:
        while waiting or any(worker.key for worker in workers):
            for worker in workers:
                if worker.key is None and waiting:
                    worker.begin(waiting.pop(0))
            ready = wait([worker.link for worker in workers if worker.key])
            for worker in workers:
                if worker.link in ready:
                    key, resources = worker.result()
                    known.update(dict.fromkeys(equal[key], resources))
                    append_rows(store, [{"key": key, "kind": kind, "resources": resources}])
    finally:
        for worker in workers:
            worker.end()
    return {key: known[key] for key in found}


class _Compiler:
    """Process that compiles configurations one at a time, and is replaced if it dies.

    Args:
        found: configurations by key.
        compile_one: function that compiles one.
    """

    def __init__(self, found: dict[str, Configuration], compile_one: Callable[[Configuration], Resources]) -> None:
        self._found, self._compile_one = found, compile_one
        self.key: str | None = None  # of the configuration that it compiles
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.link, theirs = context.Pipe()
        arguments = self._compile_one, self._found, theirs
        self._process = context.Process(target=_compile_in_child, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, key: str) -> None:
        """Begin to compile a configuration."""
        self.key = key
        self.link.send(key)

    def result(self) -> tuple[str, Resources]:
        """Return the key and the resources of the configuration, once the process has compiled it or has died."""
        assert self.key is not None
        key, self.key = self.key, None
        try:
            return key, self.link.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            signal = -(self._process.exitcode or 0)
            self._start()
            return key, Resources(error=f"Triton ended the process with signal {signal}")

    def end(self) -> None:
        """End the process, also while it compiles."""
        self._process.terminate()
        self._process.join()


def _compile_in_child(
    compile_one: Callable[[Configuration], Resources], found: dict[str, Configuration], link: Connection
) -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)  # Triton prints the whole module
    while True:
        key = link.recv()
        try:
            resources = compile_one(found[key])
        except Exception as error:
            resources = Resources(error=(str(error) or type(error).__name__)[-300:])
        link.send(resources)


def summarize(collector: Collector, results: dict[str, Resources]) -> list[dict[str, Any]]:
    """Return one row per part and GPU: configurations, largest needs, refusals, and configurations that cannot run."""
    found, rows = collector.found, []
    for gpu, part in sorted({*((x.gpu, x.part) for x in found.values()), *(x[:2] for x in collector.refused)}):
        keys = [key for key, x in found.items() if (x.gpu, x.part) == (gpu, part)]
        refusals = {reason for (*place, _), reason in collector.refused.items() if place == [gpu, part]}
        row: dict[str, Any] = {"gpu": gpu, "part": part, "configurations": len(keys), "refused": sorted(refusals)}
        if keys:
            largest = max(keys, key=lambda key: results[key].shared)
            row |= {"limit": GPUS[gpu].shared_memory, "largest_shared": results[largest].shared}
            row |= {"kernel": found[largest].kernel}
            row |= {name: max(getattr(results[key], name) for key in keys) for name in ("registers", "stack")}
        problems = ((found[key], results[key].problem(gpu)) for key in keys)
        row["problems"] = [{"kernel": x.kernel, "call": x.call, "problem": y} for x, y in problems if y is not None]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", default=["sm_80", "sm_89", "sm_90", "sm_100"], choices=GPUS)
    parser.add_argument("--parts", nargs="+", help="ops, `fused`, `solve` or `steps`; default: all")
    parser.add_argument("--widths", nargs="+", type=int, default=[16, 32, 64, 128, 256])
    parser.add_argument("--core", action="store_true", help="two shapes, all signals present, no packing")
    parser.add_argument(
        "--ignore",
        nargs="+",
        default=[],
        metavar="CONSTANT",
        help="without --cubin, compile one of the configurations that differ in these constants alone",
    )
    parser.add_argument("--cubin", action="store_true", help="compile to machine code, which takes ten times longer")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--store", type=Path, default=Path("build/gpu-targets.jsonl"), help="results of earlier runs")
    parser.add_argument("--output", type=Path, help="JSON file of the summary")
    arguments = parser.parse_args()
    collector, started = Collector(arguments.gpus), time.perf_counter()
    for part, call, function in calls(arguments.widths, arguments.core):
        if arguments.parts is None or part in arguments.parts:
            collector.run(part, call, function)
    print(f"{len(collector.found)} configurations, {time.perf_counter() - started:.0f} s", flush=True)
    compile_one = assemble if arguments.cubin else allocate
    results = compile_all(collector.found, compile_one, arguments.store, arguments.processes, arguments.ignore)
    rows = summarize(collector, results)
    for row in rows:
        need = f"{row['largest_shared']:7d} of {row['limit']} bytes ({row['kernel']})" if "kernel" in row else ""
        print(f"{row['gpu']:7s} {row['part']:10s} {row['configurations']:5d} {need}, {len(row['problems'])} problems")
        for text in (*row["refused"], *(" ".join(problem.values()) for problem in row["problems"])):
            print("   ", text)
    if arguments.output is not None:
        command = {name: x for name, x in vars(arguments).items() if name not in ("store", "output", "processes")}
        origin = {"date": str(datetime.date.today()), **provenance(torch.device("cpu"))}
        arguments.output.write_text(json.dumps({**origin, "command": command, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
