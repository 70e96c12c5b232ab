"""Count and time the host work of a training step under FSDP2, without a GPU and in one process.

    python -m kalmix_bench.perf.scaling.host --models kla-narrow,gated-deltanet-narrow

Models have width 64 and as many blocks as those of 340M parameters. Their blocks are compiled as `speed --compiled`
compiles them. PyTorch's backend "fake" stands in for a second rank, so that collectives do nothing, and the ops of
kalmix return zeros. What is left is work that the host does on a GPU, too, except for CUDA's own functions and kernels'
launches. Each row has CPU time of the thread, the least of all steps; PyTorch ops that the dispatcher calls; calls of
Python functions; and collectives of FSDP2.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed
from torch.profiler import ProfilerActivity, profile

from kalmix_bench.perf.scaling import step as scaling_step
from kalmix_bench.perf.scaling.group import check_names
from kalmix_bench.perf.scaling.step import FSDP, Cell, Run

OPS = ("diagonal_chunked", "delta_chunked")
MODELS = ("kla-narrow", "gated-deltanet-narrow")
METHODS = ("one", *FSDP)
LENGTH, WORDS = 16, 64
WARM_UP = 4  # steps before those that are timed


def skip_ops() -> torch.library.Library:
    """Let the ops of kalmix return zeros on CPUs, until the library that is returned is freed."""
    from torch._library.simple_registry import singleton

    library = torch.library.Library("kalmix", "IMPL")
    for name in (name + suffix for name in OPS for suffix in ("", "_backward")):
        kernel = singleton.find(f"kalmix::{name}").fake_impl.kernel
        assert kernel is not None
        library.impl(name, _zeros(kernel.func), "CPU")
    return library


def _zeros(fake: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    return lambda *inputs: tuple(x.zero_() for x in fake(*inputs))


def join_fake_group() -> None:
    """Join a process group of two ranks, the other of which does not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


def measure(model: str, method: str, steps: int) -> dict[str, Any]:
    """Return the host work of a step: milliseconds, ops, calls, gathers and scatters."""
    torch._dynamo.reset()
    with patch.object(scaling_step, "WORDS", WORDS):
        run = Run(Cell(model, method, 1, LENGTH, compiled=True), torch.device("cpu"))
    for group in run.optimizer.param_groups:
        group["fused"] = True  # as on a GPU
    for _ in range(WARM_UP):
        run.step()
    gc.collect()
    gc.disable()
    times = []
    for _ in range(steps):
        begin = time.thread_time()
        run.step()
        times.append(time.thread_time() - begin)
    calls = cProfile.Profile()
    calls.runcall(run.step)
    gc.enable()
    with profile(activities=[ProfilerActivity.CPU]) as recording:
        run.step()
    stats: Any = pstats.Stats(calls)
    named = {name: row[1] for (file, _, name), row in stats.stats.items() if "_fully_shard" in file}
    return {
        "ms": 1e3 * min(times),
        "ops": sum(x.count for x in recording.key_averages() if x.key.startswith(("aten::", "fsdp::", "c10d::"))),
        "calls": stats.total_calls,
        "gathers": named.get("foreach_all_gather", 0),
        "scatters": named.get("foreach_reduce", 0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="models, separated by commas")
    parser.add_argument("--methods", default=",".join(METHODS), help="methods, separated by commas")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    arguments = parser.parse_args()
    models, methods = arguments.models.split(","), arguments.methods.split(",")
    check_names(parser, "--models", models, MODELS)
    check_names(parser, "--methods", methods, METHODS)
    torch.set_num_threads(1)
    join_fake_group()
    library = skip_ops()
    for model in models:
        for method in methods:
            row = measure(model, method, arguments.steps)
            shown = ", ".join(f"{value:,} {name}" for name, value in row.items() if name != "ms")
            print(f"{model}, {method}: {row['ms']:.1f} ms, {shown}", flush=True)
            gc.collect()
    del library
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
